"""``zero1``, ``zero2``, ``zero3`` and their offloads: state split over ranks by DeepSpeed's engine.

Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"; Rajbhandari et al.
2021, "ZeRO-Infinity". The engine wraps an adapter; accumulation, clipping and schedulers stay with phalanx. Within a
window stage 1 reduces gradients once, at its end; stages 2 and 3 reduce each micro-batch's, as they keep no whole ones.
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

    ``torch.optim.Adam`` and ``AdamW`` step in DeepSpeed's fused form, or its CPU form where their state is on the CPU.
    Parameters that a window leaves unused count as having a gradient of zero, as flat updates cannot leave them out.

    Raises:
        ConfigurationError: the arguments contradict one another, or the config holds what phalanx decides.
    """

    name = "deepspeed"
    # Built for CUDA, it looks at the devices as it is imported, and no forked process could use them then.
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
        """Hold no module."""
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

    # ---- before the ranks meet ------------------------------------------------------------------------------------

    def check(self, world_size: int, device_type: str, num_nodes: int, precision: Precision) -> None:
        """Refuse a precision that the engine does not have, and a machine that DeepSpeed cannot start on."""
        check_precision(precision, device_type)
        check_secondary_shards(self.options, world_size)
        check_ops(self.options, device_type, self.name)

    def check_module(self, module: nn.Module) -> None:
        """Refuse sparse gradients."""
        check_dense(module, self.name)

    def prepare(self, device_type: str, precision: Precision) -> None:
        """Build what DeepSpeed compiles, as far as it is missing."""
        path = self.options.nvme_path if self.options.uses_nvme else None
        if path is not None and is_in_memory(path):
            _tell(f"nvme_path={str(path)!r} lies in memory, so offloading saves none: choose a folder on a disk.")
        ensure_ops(needed_ops(self.options, device_type), _tell, device_type)

    def connect(self, device_type: str, num_nodes: int, precision: Precision) -> World:
        """Join the process group; one process alone gets one too, which the engine asks for. Collective."""
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
        """The ops that were built for this rank, which DeepSpeed is to find loaded whatever it does first."""
        return needed_ops(self.options, self.world.device.type)

    @property
    def _low(self) -> torch.dtype | None:
        """The dtype that the engine computes in, where that is not fp32."""
        return None if self.precision.compute_dtype == torch.float32 else self.precision.compute_dtype

    def building(self) -> AbstractContextManager[Any]:
        """Return stage 3's context in which every layer is split as soon as it is built, or one that does nothing."""
        if self.options.stage < 3:
            return nullcontext()
        # What is built keeps fp32 until setup has taken its exact values; files on a disk cannot change their dtype.
        config = self._config(0, 0, self.precision if self.options.offload_parameters == "nvme" else None)
        return building(self.world, config, self._ops, self.precision.parameter_dtype)

    def to_device(self, module: nn.Module) -> None:
        """Put a module on its device; stage 3 takes its parameters from where they are, one by one."""
        if self.options.stage < 3:
            super().to_device(module)

    def setup(self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool) -> list[Optimizer]:
        """Start the engine around an adapter. Collective.

        Without training stages 1 and 2 hold whole models, which need no engine, and stage 3 gets none for updates.

        Raises:
            ConfigurationError: there is not exactly one optimizer, or the engine cannot take it.
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
            # Schedulers count the calls of the user's object, which nobody steps.
            optimizers[0].__dict__["_opt_called"] = True
        return list(optimizers)

    def _set_aside(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Freeze for the time of the fit what the optimizer does not train: the engine would keep its gradients."""
        self._marks = OriginalAttributes(module)
        for parameter in module.parameters():
            # The engine would take one that an earlier fit left for part of its first.
            parameter.grad = None
        if optimizers:
            trained = {id(one) for one in parameters_of(optimizers[0])}
            for parameter in module.parameters():
                if id(parameter) not in trained:
                    parameter.requires_grad_(False)
        self._trainable = [parameter.requires_grad for parameter in module.parameters()]

    def _split_and_start(self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool) -> None:
        """Split the module, and start the engine of stage 3."""
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
        # Stage 3 looks LOCAL_RANK up in forward passes.
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
        """Return the engine's config; files on a disk go to a folder of this rank's own."""
        if self.options.uses_nvme and self._swap_folder is None:
            path = self.options.nvme_path
            assert path is not None
            path.mkdir(parents=True, exist_ok=True)
            self._swap_folder = Path(tempfile.mkdtemp(prefix=f"phalanx-rank{self.world.rank}-", dir=path))
        folder = self._swap_folder
        if folder is not None:
            # Whoever splits parameters empties the folder first: not that of layers that were split as they were built.
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
            # Parameters that stay gathered serve the next training step too, where inference tensors may not be.
            grad = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                return unpack(routed(*args, **kwargs))

        return evaluate

    # ---- gradients and updates ------------------------------------------------------------------------------------

    def sync_gradients(self, enabled: bool) -> None:
        """Tell the engine whether the window ends with the next backward."""
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
        """Refuse parameters that were frozen or unfrozen since set-up: the engine's flat tensors hold what it trains.

        Raises:
            ConfigurationError: on all ranks.
        """
        if self._update is None:
            return False
        for trained, (name, parameter) in zip(self._trainable, module.named_parameters(), strict=True):
            if trained != parameter.requires_grad:
                raise ConfigurationError(
                    f"{name} was {'frozen' if trained else 'unfrozen'} during a fit under strategy={self.name!r}, "
                    "whose flat tensors are made for what was trained at its start: set requires_grad before the "
                    "fit, or use strategy='ddp' or 'fsdp'."
                )
        return False

    def zero_backward(self) -> None:
        """There is no backward without a forward here.

        Raises:
            LoopError: always.
        """
        raise LoopError(f"strategy={self.name!r} reduces what a real backward pass computes: every rank must run one.")

    def reduce_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Gradients are reduced in every backward that ends a window; there is nothing left to do."""

    def scale_gradients(self, parameters: Iterable[Tensor], factor: float) -> None:
        """Multiply all gradients, as of the coming step."""
        self._training.scale(factor)

    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the whole gradient of a parameter, gathered. Collective.

        It is there between the backward that ends a window and the update. A parameter that the window left unused has
        a gradient of zero.
        """
        update = self._training
        assert self._state is not None
        if id(parameter) not in self._state.groups.trained or not update.holds_gradients or not self._boundary:
            return None
        from deepspeed.utils import safe_get_full_grad

        gradient = safe_get_full_grad(parameter)
        return None if gradient is None else update.unscaled(gradient)

    def gradients_are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the norm that the coming step needs anyway is finite. Collective."""
        return math.isfinite(self._training.norm().item())

    def gradient_norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of the whole gradient, whatever ``parameters`` are; infinite if not finite. Collective.

        Raises:
            ConfigurationError: it is not the L2 norm, the only one that the engine computes.
        """
        if norm_type != 2.0:
            raise ConfigurationError(
                f"norm_type={norm_type} is not possible under strategy={self.name!r}, whose engine computes the L2 "
                "norm: use 2.0, or strategy='ddp'."
            )
        return self._training.norm()

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Have the coming step clip the whole gradient by its norm."""
        self._training.clip(max_norm)

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Forget gradients that no update used; those of an update are gone with it."""
        if self._update is not None and self._update.holds_gradients:
            self._update.drop()

    def step(self, optimizer: Optimizer) -> bool:
        """Apply the update with the hyperparameters that the user's optimizer has now. Collective."""
        return self._training.step()

    def sync_buffers(self, module: nn.Module) -> None:
        """Broadcast rank 0's buffers: the engine leaves each rank its own. Collective."""
        share_buffers(module, self.world)

    # ---- canonical state ------------------------------------------------------------------------------------------

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the whole shape of every tensor in a module's canonical state, by name."""
        return {name: full_shape(tensor) for name, tensor in state_tensors(module).items()}

    def model_state(self, module: nn.Module) -> dict[str, Shard]:
        """Return this rank's pieces of the fp32 masters, and what is whole. Collective."""
        return super().model_state(module) if self._state is None else self._state.model_state(module)

    def load_model_state(self, module: nn.Module, tensors: StoredTensors) -> None:
        """Take over weights: each rank reads its own pieces. Collective."""
        if self._state is None:
            super().load_model_state(module, tensors)
        else:
            self._state.load_model_state(module, tensors)

    def optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Slots]]:
        """Yield each parameter that has state, and this rank's pieces of its slots. Collective."""
        assert self._state is not None
        return self._state.optimizer_state()

    def stepping_optimizer(self, optimizer: Optimizer) -> Optimizer | None:
        """Return DeepSpeed's, where it steps on this thread."""
        assert self._state is not None
        return self._state.groups.stepping

    def load_optimizer_state(self, optimizer: Optimizer, state: Sequence[Slots], groups: list[dict[str, Any]]) -> None:
        """Put moments, step counters and hyperparameters back: each rank reads its own pieces. Collective."""
        assert self._state is not None
        self._state.load_optimizer_state(optimizer, state, groups)

    # ---- the end --------------------------------------------------------------------------------------------------

    def restore(self, module: nn.Module) -> None:
        """Give the module whole, ordinary weights in the dtype that it came with. Collective.

        Stages 1 and 2 hold them on every rank. Stage 3 gathers them parameter by parameter: on rank 0, the others'
        being left on the meta device, on all ranks, or not at all, as ``gather_weights`` says.
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
        """Let go of the engine and of what DeepSpeed keeps; weights that ``restore`` did not gather stay split."""
        self._stop(None)


def _tell(line: str) -> None:
    """Say what is being built: a start that takes minutes should not look like one that hangs."""
    print(line, file=sys.stderr, flush=True)
