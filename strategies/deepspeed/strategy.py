"""``zero1``, ``zero2``, ``zero3`` and their offloads: state sharded over ranks by DeepSpeed's engine.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"; Rajbhandari et al.
2021, "ZeRO-Infinity". The engine wraps an adapter; accumulation, clipping and schedulers stay with phalanx. Within a
window stage 1 reduces gradients once, at its end; stages 2 and 3 reduce those of each micro-batch, as they store no
full gradients.
"""

from __future__ import annotations

import copy
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...framework.checkpoint.stored_tensor import StoredTensors
from ...framework.checkpoint.write_plan import Shard
from ...framework.core.errors import ConfigurationError, LoopError
from ...framework.core.precision import Precision
from ...framework.distributed.world import World
from ...framework.parallel.meta_device import share_buffers
from ...framework.parallel.parameter_names import state_tensors
from ...framework.parallel.strategy import Slots, StepFunction, Strategy, Traits, parameters_of
from ..limits import check_dense
from .arguments import check_secondary_shards, resolve_options
from .attributes import OriginalAttributes
from .build import ensure_ops
from .config import check_precision, engine_config
from .engine import backend, building, converter, start_engine, stop_engine
from .ops import check_ops, needed_ops
from .optimizer import Following, engine_optimizer, engine_size
from .pieces import FlatGroups, full_shape
from .setup import (
    TensorsOnlyAdapter,
    allow_exact_statistics,
    broadcast_module,
    expand_missing,
    full_precision_weights,
    gather_weights,
    load_full_precision,
    restore_classes,
    split_parameters,
)
from .state import EngineState
from .swap import is_in_memory
from .update import EngineUpdate

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .arguments import ZeroArguments


class DeepSpeedStrategy(Strategy):
    """Trains through DeepSpeed's engine with ZeRO stage 1, 2 or 3; see ``ZeroArguments`` for the arguments.

    ``torch.optim.Adam`` and ``AdamW`` step in DeepSpeed's fused form, or in its CPU form if their state is on the CPU.
    Parameters unused in a window have a gradient of zero, as flat updates cannot leave them out.

    Raises:
        ConfigurationError: arguments contradict one another, or the config contains a setting that phalanx decides.
    """

    name = "deepspeed"
    # With CUDA, importing DeepSpeed queries the devices, and no forked process could use them afterwards.
    if not torch.backends.cuda.is_built():
        libraries = (*Strategy.libraries, "phalanx.strategies.deepspeed.library")

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
        self._forget()

    def _forget(self) -> None:
        """Release the module and the engine."""
        self._engine: Any = None
        self._adapter: TensorsOnlyAdapter | None = None
        self._update: EngineUpdate | None = None
        self._state: EngineState | None = None
        self._marks: OriginalAttributes | None = None
        self._kinds: dict[nn.Module, type[nn.Module]] = {}
        self._trainable: list[bool] = []
        self._boundary = True
        self._swap_folder: Path | None = None
        self._unset: Callable[[], None] | None = None

    # ---- before the process group exists --------------------------------------------------------------------------

    def check(self, world_size: int, device_type: str, num_nodes: int, precision: Precision) -> None:
        """Refuse a precision that the engine does not support, and a machine on which DeepSpeed cannot start."""
        check_precision(precision, device_type)
        check_secondary_shards(self.options, world_size)
        check_ops(self.options, device_type, self.name)

    def check_module(self, module: nn.Module) -> None:
        """Refuse sparse gradients."""
        check_dense(module, self.name)

    def prepare(self, device_type: str, precision: Precision) -> None:
        """Build the C++ ops that are missing."""
        path = self.options.nvme_path if self.options.uses_nvme else None
        if path is not None and is_in_memory(path):
            _tell(f"nvme_path={str(path)!r} lies in memory, so offloading saves none: choose a folder on a disk.")
        ensure_ops(needed_ops(self.options, device_type), _tell, device_type)

    def connect(self, device_type: str, num_nodes: int, precision: Precision) -> World:
        """Join the process group; a single process creates one too, as the engine requires it. Collective."""
        self.precision = precision
        self.world = World.from_environment(device_type, num_nodes, grouped=True)
        return self.world

    # ---- a module and its optimizer -------------------------------------------------------------------------------

    def clone(self) -> Strategy:
        """Return a strategy like this one that holds no module."""
        other = copy.copy(self)
        other._forget()
        return other

    @property
    def _ops(self) -> list[str]:
        """The ops built for this rank, loaded before DeepSpeed can try to compile them."""
        return needed_ops(self.options, self.world.device.type)

    @property
    def _low(self) -> torch.dtype | None:
        """The compute dtype of the engine, or None for fp32."""
        return None if self.precision.compute_dtype == torch.float32 else self.precision.compute_dtype

    def building(self) -> AbstractContextManager[Any]:
        """Return the context in which stage 3 shards layers as they are built; no effect in other stages."""
        if self.options.stage < 3:
            return nullcontext()
        # Parameters stay fp32 until setup has read their exact values. Those offloaded to a disk are built in the
        # compute dtype, as their files cannot change the dtype.
        config = self._config(0, 0, self.precision if self.options.offload_parameters == "nvme" else None)
        return building(self.world, config, self._ops, self.precision.parameter_dtype)

    def to_device(self, module: nn.Module) -> None:
        """Move a module to its device; stage 3 moves the parameters one by one in ``setup`` instead."""
        if self.options.stage < 3:
            super().to_device(module)

    def setup(self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool) -> list[Optimizer]:
        """Start the engine around an adapter. Collective.

        Without training, stages 1 and 2 hold full models, which need no engine, and stage 3 has an engine without
        updates.

        Raises:
            ConfigurationError: there is not exactly one optimizer, or the engine does not support it.
        """
        if training and len(optimizers) != 1:
            raise ConfigurationError(
                f"strategy={self.name!r} trains with exactly one optimizer, got {len(optimizers)}: put all parameters "
                "in the groups of one, or use strategy='fsdp'."
            )
        self.check_module(module)
        if self.options.stage == 3:
            expand_missing(module, optimizers, self.world)
        self._set_aside(module, optimizers if training else [])
        if self.options.stage == 3:
            self._split_and_start(module, optimizers, training)
        else:
            broadcast_module(module, self.world)
            if training:
                self._hold(module, optimizers, full_precision_weights(module, self._low))
        if training:
            # Schedulers count the calls of step of the user's optimizer, which the engine never calls: without the
            # count they would warn.
            optimizers[0].__dict__["_opt_called"] = True
        return list(optimizers)

    def _set_aside(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Freeze parameters without an optimizer during the fit: the engine would store their gradients."""
        self._marks = OriginalAttributes(module)
        for parameter in module.parameters():
            # The engine would add a gradient left by an earlier fit to its first one.
            parameter.grad = None
        if optimizers:
            trained = {id(one) for one in parameters_of(optimizers[0])}
            for parameter in module.parameters():
                if id(parameter) not in trained:
                    parameter.requires_grad_(False)
        self._trainable = [parameter.requires_grad for parameter in module.parameters()]

    def _split_and_start(self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool) -> None:
        """Shard the module, and start the engine of stage 3."""
        low = self._low if training else None
        config = self._sized(module, training)
        with backend(self.world, self._ops):
            exact = split_parameters(module, converter(self.world, config), self.world, low)
        self._hold(module, optimizers if training else [], exact, config)

    def _hold(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        exact: dict[int, Tensor],
        config: dict[str, Any] | None = None,
    ) -> None:
        self._adapter = TensorsOnlyAdapter(module)
        # Stage 3 reads LOCAL_RANK in forward passes.
        self._unset = self.world.set_variables()
        config = config or self._sized(module, bool(optimizers))
        with backend(self.world, self._ops):
            inner = engine_optimizer(optimizers[0], self.options, self.world.device.type) if optimizers else None
            self._engine = start_engine(self._adapter, inner, config)
        groups = FlatGroups(self._engine, self.world)
        rest = load_full_precision(groups, module, exact, self.world)
        self._state = EngineState(groups, rest, self.world)
        if optimizers:
            self._kinds = allow_exact_statistics(module) if self._low is not None else {}
            self._update = EngineUpdate(self._engine, Following(optimizers[0], groups.inner))

    def _sized(self, module: nn.Module, training: bool) -> dict[str, Any]:
        sizes = [engine_size(parameter) for parameter in module.parameters()]
        return self._config(sum(sizes), max(sizes, default=0), self.precision if training else None)

    def _config(self, elements: int, largest: int, precision: Precision | None) -> dict[str, Any]:
        """Return the engine's config, with a separate folder for this rank's files on a disk."""
        if self.options.uses_nvme and self._swap_folder is None:
            path = self.options.nvme_path
            assert path is not None
            path.mkdir(parents=True, exist_ok=True)
            self._swap_folder = Path(tempfile.mkdtemp(prefix=f"phalanx-rank{self.world.rank}-", dir=path))
        folder = self._swap_folder
        if folder is not None:
            # Sharding starts by emptying the folder, so it must not be the folder of layers that were sharded as they
            # were built.
            folder /= "split" if elements else "built"
        return engine_config(self.options, precision, self.world.size, elements, largest or None, swap_folder=folder)

    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return a call of ``step`` through the engine when training, and under stage 3 always."""
        if self._engine is None or self._adapter is None or (not training and self.options.stage < 3):
            return step
        routed = partial(self._engine, step)
        if self.options.stage < 3:
            return routed
        unpack = self._adapter.unpack
        if training:
            return lambda *args, **kwargs: unpack(routed(*args, **kwargs))

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            # Parameters may stay gathered until the next training step, where autograd does not accept inference
            # tensors.
            grad = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                return unpack(routed(*args, **kwargs))

        return evaluate

    # ---- gradients and updates ------------------------------------------------------------------------------------

    def sync_gradients(self, enabled: bool) -> None:
        """Set on the engine whether the window ends with the next backward pass."""
        if self._engine is not None and enabled is not self._boundary:
            self._boundary = enabled
            self._engine.set_gradient_accumulation_boundary(enabled)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients through the engine, which scales the loss in fp16 and reduces them."""
        self._engine.backward(loss, scale_wrt_gas=False, **options)
        self._training.after_backward(self._boundary)

    @property
    def _training(self) -> EngineUpdate:
        if self._update is None:
            raise LoopError(f"strategy={self.name!r} holds no module that is being trained: call setup with one first.")
        return self._update

    def trainability_changed(self, module: nn.Module) -> bool:
        """Refuse parameters that were frozen or unfrozen since set-up: the engine's flat tensors cannot change.

        Raises:
            ConfigurationError: on all ranks.
        """
        if self._update is None:
            return False
        for trained, (name, parameter) in zip(self._trainable, module.named_parameters(), strict=True):
            if trained != parameter.requires_grad:
                raise ConfigurationError(
                    f"{name} was {'frozen' if trained else 'unfrozen'} during a fit under strategy={self.name!r}, "
                    "whose flat tensors are fixed when the fit starts: set requires_grad before the "
                    "fit, or use strategy='ddp' or 'fsdp'."
                )
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
        """Do nothing: the backward pass that ends a window has reduced the gradients."""

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float) -> None:
        """Multiply all gradients, with effect in the next step."""
        self._training.scale(factor)

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the full gradient of a parameter, gathered. Collective.

        It is available between the backward pass that ends a window and the update. A parameter unused in the window
        has a gradient of zero.
        """
        update = self._training
        assert self._state is not None
        if id(parameter) not in self._state.groups.trained or not update.holds_gradients or not self._boundary:
            return None
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
        return None if gradient is None else update.unscaled(gradient)

    def gradients_are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the gradient norm, which the next step needs anyway, is finite. Collective."""
        return math.isfinite(self._training.norm().item())

    def gradient_norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients, regardless of ``parameters``; infinite if not finite. Collective.

        Raises:
            ConfigurationError: ``norm_type`` is not 2; the engine computes only the L2 norm.
        """
        if norm_type != 2.0:
            raise ConfigurationError(
                f"norm_type={norm_type} is not possible under strategy={self.name!r}, whose engine computes the L2 "
                "norm: use 2.0, or strategy='ddp'."
            )
        return self._training.norm()

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Clip all gradients by their norm in the next step."""
        self._training.clip(max_norm)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop gradients that no update has used; an update drops its own."""
        if self._update is not None and self._update.holds_gradients:
            self._update.drop()

    def step(self, optimizer: Optimizer) -> bool:
        """Apply the update with the current hyperparameters of the user's optimizer. Collective."""
        return self._training.step()

    def sync_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers, which the engine does not synchronize. Collective."""
        share_buffers(module, self.world)

    # ---- canonical state ------------------------------------------------------------------------------------------

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every tensor in a module's canonical state, by name."""
        return {name: full_shape(tensor) for name, tensor in state_tensors(module).items()}

    def model_state(self, module: nn.Module) -> dict[str, Shard]:
        """Return this rank's pieces of the fp32 masters, and the unsharded tensors. Collective."""
        return super().model_state(module) if self._state is None else self._state.model_state(module)

    def load_model_state(self, module: nn.Module, tensors: StoredTensors) -> None:
        """Load weights: each rank reads its own pieces. Collective."""
        if self._state is None:
            super().load_model_state(module, tensors)
        else:
            self._state.load_model_state(module, tensors)

    def optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Slots]]:
        """Yield each parameter that has state, and this rank's pieces of its slots. Collective."""
        assert self._state is not None
        return self._state.optimizer_state()

    def stepping_optimizer(self, optimizer: Optimizer) -> Optimizer | None:
        """Return DeepSpeed's optimizer if it steps in this thread, else None."""
        assert self._state is not None
        return self._state.groups.stepping

    def load_optimizer_state(self, optimizer: Optimizer, state: Sequence[Slots], groups: list[dict[str, Any]]) -> None:
        """Load moments, step counters and hyperparameters: each rank reads its own pieces. Collective."""
        assert self._state is not None
        self._state.load_optimizer_state(optimizer, state, groups)

    # ---- the end --------------------------------------------------------------------------------------------------

    def restore(self, module: nn.Module) -> None:
        """Give the module full, ordinary weights in its original dtype. Collective.

        Stages 1 and 2 hold full weights on every rank. Stage 3 gathers them parameter by parameter according to
        ``gather_weights``: on rank 0, with those of the other ranks on the meta device, on all ranks, or not at all.
        """
        if self._state is None or self._marks is None:
            return
        kept = self.options.gather_weights if self.options.stage == 3 else "all"
        if kept != "none":
            here = kept == "all" or self.world.is_global_zero
            gather_weights(module, self._state, self._marks.dtypes, here)
        self._stop(module if kept != "none" else None)

    def _stop(self, module: nn.Module | None) -> None:
        marks, engine, folder, unset = self._marks, self._engine, self._swap_folder, self._unset
        restore_classes(self._kinds)
        self._forget()
        if engine is not None:
            stop_engine(engine)
        if module is not None and marks is not None:
            marks.restore(module)
        if unset is not None:
            unset()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

    def teardown(self) -> None:
        """Release the engine and DeepSpeed's references; weights that ``restore`` did not gather stay sharded."""
        self._stop(None)


def _tell(line: str) -> None:
    """Print a line about a build: a start that takes minutes must not look like a hang."""
    print(line, file=sys.stderr, flush=True)
