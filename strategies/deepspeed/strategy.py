"""``zero1``, ``zero2``, ``zero3`` and their offloads: state sharded over ranks by DeepSpeed's engine.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"; Rajbhandari et al.
2021, "ZeRO-Infinity". The engine wraps an adapter; accumulation, clipping and schedulers stay with phalanx. Within a
window stage 1 reduces gradients once, at its end; stages 2 and 3 reduce those of each micro-batch, as they store no
full gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ...framework.core.errors import ConfigurationError, LoopError
from ...framework.core.precision import Precision
from ...framework.distributed.world import World
from ...framework.parallel.canonical_state import CanonicalState
from ...framework.parallel.deferred import Deferred
from ...framework.parallel.gradient_operations import GradientOperations
from ...framework.parallel.meta_device import share_buffers
from ...framework.parallel.step_flags import OrderFlags, StepFlags
from ...framework.parallel.strategy import MemoryLayout, Place, Recovery, Routed, StepFunction, Strategy, Traits
from ...framework.system.environment import nvme_path
from ..limits import check_dense
from .arguments import check_swap_folder, is_in_memory, resolve_options
from .config import check_precision, check_settings
from .library import require_deepspeed
from .ops import build_ops, check_build, needed_ops, print_note
from .session import EngineSession
from .state import PartitionedState
from .update import EngineRecovery, EngineUpdate, LateUpdate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import Offload, ZeroArguments

_PLACES: dict[Offload | None, Place] = {None: "device", "cpu": "host", "nvme": "disk"}


class DeepSpeedStrategy(Strategy):
    """Trains through DeepSpeed's engine with ZeRO stage 1, 2 or 3; see ``ZeroArguments`` for the arguments.

    ``torch.optim.Adam`` and ``AdamW`` step in torch's fused form, or in DeepSpeed's CPU form if state is offloaded.
    ``parameter.grad`` is the full gradient between a backward pass and the update, gathered when it is read. Updates
    leave out parameters without a gradient, and what user code writes into weights stays. Under stage 3 an operation on
    a parameter outside its layer gathers it, so that all ranks must call it.

    Raises:
        ConfigurationError: arguments contradict one another, or the config contains a setting that phalanx decides.
    """

    name = "deepspeed"
    # The engine flattens the parameters of the optimizer into one tensor.
    fixes_parameters = True
    # DeepSpeed chooses the type of device when it is imported.
    libraries = (*Strategy.libraries, "phalanx.strategies.deepspeed.library_on_{device_type}")

    def __init__(self, **arguments: Unpack[ZeroArguments]) -> None:
        self.options = resolve_options(**arguments)
        options = self.options
        self.name = f"zero{options.stage}" + ("-nvme" if options.uses_nvme else "-offload" if options.offloads else "")
        self.traits = Traits(
            shards_state=True,
            takes_one_optimizer=True,
            owns_loss_scale=True,
            forward_has_collectives=options.stage == 3,
            backward_has_collectives=True,
            reduces_in_backward=True,
            weights_on_disk=options.offload_optimizer == "nvme",
            load_is_collective=options.stage < 3,
        )
        self.memory_layout = MemoryLayout(
            splits_parameters=options.stage == 3,
            splits_gradients=options.stage >= 2,
            splits_state=True,
            engine=True,
            parameters_on=_PLACES[options.offload_parameters],
            state_on=_PLACES[options.offload_optimizer],
        )
        if options.stage == 3:
            self.prevents_compiling = (
                "gathers the parameters of each layer in hooks, which end compiled code there: leave that out, or use "
                "strategy='fsdp'"
            )
        self._deferred: Deferred
        self._supplied: Collection[str] = ()
        self._forget()

    def _forget(self) -> None:
        """Drop the module and the engine."""
        self._session: EngineSession | None = None
        # Bound here, as every micro-batch uses it.
        self._update: EngineUpdate | None = None
        self.gradients: GradientOperations = NoGradients()
        self.flags: StepFlags | None = None
        self.recovery = Recovery() if self.options.stage < 3 else None
        self.traits = replace(self.traits, backward_has_collectives=True)
        self.state: CanonicalState = PartitionedState()

    # ---- before the process group exists --------------------------------------------------------------------------

    def check(self, world_size: int, device_type: str, num_nodes: int, precision: Precision) -> None:
        """Refuse what the engine does not support, and a machine without DeepSpeed or a compiler."""
        check_swap_folder(self.options)
        check_precision(precision, device_type)
        require_deepspeed(self.name)
        check_settings(self.options, device_type)
        check_build(needed_ops(self.options), device_type)

    def check_module(self, module: nn.Module) -> None:
        """Refuse sparse gradients."""
        check_dense(module, self.name)

    def prepare(self, device_type: str, precision: Precision) -> None:
        """Let DeepSpeed build the C++ ops that are missing."""
        path = self.options.nvme_path if self.options.uses_nvme else None
        if path is not None and is_in_memory(path):
            print_note(f"nvme_path={str(path)!r} lies in memory, so offloading saves none: choose a folder on a disk.")
        build_ops(needed_ops(self.options), device_type)

    def connect(self, device_type: str, num_nodes: int, precision: Precision) -> World:
        """Join the process group; a single process creates one too, as the engine requires it. Collective."""
        self.precision = precision
        self.world = World.from_environment(device_type, num_nodes, grouped=True)
        self._deferred = Deferred()
        return self.world

    # ---- a module and its optimizer -------------------------------------------------------------------------------

    def clone(self) -> Strategy:
        other = copy.copy(self)
        other._forget()
        return other

    def building(self) -> AbstractContextManager[Any]:
        """Return the context in which stage 3 builds parameters without data; no effect in other stages."""
        return self._deferred.recording() if self.options.stage == 3 else nullcontext()

    def to_device(self, module: nn.Module, supplied: Collection[str] = ()) -> None:
        """Move a module to its device; stage 3 moves the parameters one by one in ``setup`` instead."""
        self._supplied = supplied
        if self.options.stage == 3:
            self._deferred.keep(module)
        else:
            super().to_device(module, supplied)

    def setup(
        self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool, routed: Routed = Routed.LOSS
    ) -> list[Optimizer]:
        """Start the engine around an adapter. Collective.

        Raises:
            ConfigurationError: there is not exactly one optimizer, or the engine does not support it.
        """
        if training and len(optimizers) != 1:
            raise ConfigurationError(
                f"strategy={self.name!r} trains with exactly one optimizer, got {len(optimizers)}: put all parameters "
                "in the groups of one, or use strategy='fsdp'."
            )
        self.check_module(module)
        reduces_later = training and routed is Routed.REPEATED
        self._session = session = EngineSession(self.name, self.options, self.world, self.precision, reduces_later)
        session.start(module, optimizers if training else [], self._deferred, self._supplied)
        self._update = session.update
        if isinstance(session.update, LateUpdate):
            self.recovery = EngineRecovery(session.update)
            self.traits = replace(self.traits, backward_has_collectives=False)
        if session.update is not None:
            self.gradients = session.update
        if session.state is not None:
            self.state = session.state
            gathering = session.state.gathering
            if training and gathering is not None and self.world.size > 1:
                self.flags = OrderFlags(self.world, gathering.order)
        if training:
            # Schedulers count the calls of step of the user's optimizer, which the engine never calls: without the
            # count they would warn.
            optimizers[0]._opt_called = True  # type: ignore[attr-defined]
        return list(optimizers)

    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return a call of ``step`` through the engine when training, and under stage 3 always."""
        return step if self._session is None else self._session.route(step, training)

    # ---- gradients and updates ------------------------------------------------------------------------------------

    def sync_gradients(self, enabled: bool) -> None:
        """Set on the engine whether the window ends with the next backward pass."""
        if self._update is not None:
            self._update.sync(enabled)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients through the engine, which scales the loss in fp16 and reduces them.

        A strategy without a module leaves them to the engines of the modules that the loss depends on.

        Raises:
            ConfigurationError: the module was set up without an optimizer.
        """
        if self._session is None:
            loss.backward(**options)
        elif self._update is None:
            raise ConfigurationError(
                f"strategy={self.name!r} computes gradients in an engine that starts with an optimizer, and the module "
                "of this loss was set up without one: call setup(module, optimizer)."
            )
        else:
            self._update.backward(loss, **options)

    def trainability_changed(self, module: nn.Module) -> bool:
        """Refuse parameters that were frozen or unfrozen since set-up: the engine's flat tensors cannot change.

        Raises:
            ConfigurationError: on all ranks.
        """
        if self._update is not None and self._session is not None:
            self._session.check_trainable(module)
        return False

    def zero_backward(self) -> None:
        """Raise, as the engine has no backward pass without a forward pass.

        Raises:
            LoopError: always.
        """
        raise LoopError(
            f"strategy={self.name!r} reduces the gradients of a real backward pass: every rank must run one."
        )

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients, unless the pass that ended the window has done so. Collective."""
        if self._update is not None:
            self._update.reduce()

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop gradients that no update has used; an update drops its own."""
        if self._update is not None:
            self._update.drop()

    def step(self, optimizer: Optimizer) -> bool:
        """Apply the update with the current hyperparameters of the user's optimizer. Collective.

        Raises:
            LoopError: no module is being trained.
        """
        if self._update is None:
            raise LoopError(f"strategy={self.name!r} holds no module that is being trained: call setup with one first.")
        return self._update.step()

    def sync_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers, which the engine does not synchronize. Collective."""
        share_buffers(module, self.world)

    # ---- the end --------------------------------------------------------------------------------------------------

    def restore(self, module: nn.Module) -> None:
        """Give the module full, ordinary weights in its original dtype, as ``gather_weights`` says. Collective."""
        session = self._session
        if session is not None and session.state is not None:
            self._stop(module if session.gather(module) else None)

    def teardown(self) -> None:
        """Release the engine and DeepSpeed's references; weights that ``restore`` did not gather stay sharded."""
        self._stop(None)

    def _stop(self, module: nn.Module | None) -> None:
        session = self._session
        # First, as stopping the engine frees the tensors that nothing refers to any more.
        self._forget()
        if session is not None:
            session.stop(module)


class NoGradients(GradientOperations):
    """Operations on gradients before an engine has any."""

    clips_by_value = False


# ---- named strategies ----------------------------------------------------------------------------------------------
# Each takes the arguments of ``DeepSpeedStrategy``, which take precedence.


def zero1(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split the optimizer's state."""
    return _with(arguments, stage=1)


def zero2(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split the optimizer's state and gradients."""
    return _with(arguments, stage=2)


def zero3(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split the optimizer's state, gradients and parameters."""
    return _with(arguments, stage=3)


def zero1_offload(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split the optimizer's state, and keep it on the CPU."""
    return _with(arguments, stage=1, offload_optimizer="cpu")


def zero2_offload(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split the optimizer's state and gradients, and keep the state on the CPU."""
    return _with(arguments, stage=2, offload_optimizer="cpu")


def zero3_offload(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split everything, and keep the optimizer's state and parameters on the CPU."""
    return _with(arguments, stage=3, offload_optimizer="cpu", offload_parameters="cpu")


def zero3_nvme(**arguments: Unpack[ZeroArguments]) -> DeepSpeedStrategy:
    """Split everything, and keep the optimizer's state and parameters on a disk.

    The folder is ``nvme_path``, or by default the one in the environment variable ``PHALANX_NVME_PATH``.
    """
    return _with(arguments, stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path=nvme_path())


def _with(arguments: Any, **defaults: Any) -> DeepSpeedStrategy:
    return DeepSpeedStrategy(**{**defaults, **arguments})
