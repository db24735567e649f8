"""``EngineSession``: one module in DeepSpeed's engine, from set-up to release."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...framework.core.errors import ConfigurationError
from ...framework.core.optimizer_config import parameters_of
from ...framework.core.precision import Precision
from ...framework.distributed.world import World
from ...framework.parallel.deferred import Deferred
from ...framework.parallel.meta_device import supplied_names
from ...framework.parallel.strategy import StepFunction
from .access import LentGradients, are_watched, engine_runs, unwatch, watch
from .arguments import ZeroOptions
from .config import engine_config
from .engine import Splitter, backend, start_engine, stop_engine, use_local_device
from .flat_groups import FlatGroups, full_size
from .lent_state import LentState
from .optimizer import Following, check_one_dtype, engine_optimizer
from .outputs import OutputAdapter
from .setup import (
    OriginalAttributes,
    UnsplitValues,
    allow_exact_statistics,
    broadcast_module,
    check_elements,
    check_memory,
    full_precision_weights,
    gather_weights,
    load_full_precision,
    restore_classes,
    split_parameters,
)
from .sharded import Gathering, explained, no_copy, refuse_empty_state
from .state import EngineState
from .update import EngineUpdate, LateUpdate


class EngineSession:
    """Start, use and release of DeepSpeed's engine for one module.

    Records the module's original attributes and restores them in ``stop``. Everything is stored as soon as it exists,
    so that ``stop`` also releases a session whose start has failed.

    Args:
        name: the name of the strategy, for errors.
        options: its arguments.
        world: the ranks.
        precision: the precision of training.
        reduces_later: whether gradients are reduced after the last backward pass of a window, see ``LateUpdate``.
    """

    update: EngineUpdate | None = None
    """Applies updates; None without training."""
    state: EngineState | None = None
    """The state that the engine holds; None without an engine."""

    def __init__(
        self, name: str, options: ZeroOptions, world: World, precision: Precision, reduces_later: bool = False
    ) -> None:
        self._name = name
        self._options = options
        self._world = world
        self._precision = precision
        self._update_class = LateUpdate if reduces_later else EngineUpdate
        self._engine: Any = None
        self._adapter: OutputAdapter | None = None
        self._original: OriginalAttributes | None = None
        self._classes: dict[nn.Module, type[nn.Module]] = {}
        self._handles: list[RemovableHandle] = []
        self._trainable: list[tuple[str, nn.Parameter, bool]] = []
        self._watched: list[nn.Parameter] = []
        self._left_out: set[int] = set()
        self._swap_folder: Path | None = None

    # ---- start ----------------------------------------------------------------------------------------------------

    def start(
        self, module: nn.Module, optimizers: Sequence[Optimizer], deferred: Deferred, supplied: Collection[str]
    ) -> None:
        """Prepare a module, and start the engine where there is something for it to do. Collective.

        Without optimizers, stages 1 and 2 hold full models, which need no engine, and stage 3 has an engine without
        updates.

        Args:
            module: the user's module.
            optimizers: the module's optimizer; empty for evaluation.
            deferred: the recipes of the parameters that were built without data.
            supplied: canonical names of the tensors that are loaded later.

        Raises:
            ConfigurationError: the engine does not support the optimizer, rank 0 has no data for a parameter, or
                another engine has parameters of the module.
        """
        if are_watched(module.parameters()):
            # The hooks of that engine would take the gradients.
            raise ConfigurationError(
                f"strategy={self._name!r} was given a {type(module).__name__} that is still in the engine of an "
                "earlier set-up: call free_memory of the Fabric that set it up, or build a new module."
            )
        compute_dtype = self._compute_dtype if optimizers else None
        check_memory(module, self._name)
        for optimizer in optimizers:
            check_one_dtype(module, optimizer, compute_dtype, self._name)
        if self._options.stage == 3:
            check_elements(module)
            origins = UnsplitValues(module, optimizers, self._world, deferred, supplied_names(module, supplied))
        self._record_and_freeze(module, optimizers)
        if self._options.stage == 3:
            config = self._config(module, bool(optimizers))
            with backend(self._world):
                fp32_weights = split_parameters(module, Splitter(config), self._world, compute_dtype, origins)
            self._start_engine(module, optimizers, fp32_weights, config)
        else:
            broadcast_module(module, self._world, supplied)
            if optimizers:
                fp32_weights = full_precision_weights(module, compute_dtype)
                self._start_engine(module, optimizers, fp32_weights, self._config(module, True))

    @property
    def _compute_dtype(self) -> torch.dtype | None:
        """The compute dtype of the engine, or None for fp32."""
        return None if self._precision.compute_dtype == torch.float32 else self._precision.compute_dtype

    def _record_and_freeze(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Record the module's attributes, drop its gradients, and freeze parameters that no optimizer updates."""
        self._original = OriginalAttributes(module)
        for parameter in module.parameters():
            # The engine would add a gradient left by an earlier fit to its first one.
            parameter.grad = None
        if optimizers:
            # The engine would store gradients of parameters without an optimizer.
            trained = {id(one) for one in parameters_of(optimizers[0])}
            for parameter in module.parameters():
                if id(parameter) not in trained and parameter.requires_grad:
                    self._left_out.add(id(parameter))
                    parameter.requires_grad_(False)
        self._trainable = [(name, one, one.requires_grad) for name, one in module.named_parameters()]

    def _start_engine(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        fp32_weights: dict[int, Tensor],
        config: dict[str, Any],
    ) -> None:
        self._adapter = OutputAdapter(module)
        with backend(self._world):
            use_local_device(self._world)
            inner = engine_optimizer(optimizers[0], self._options) if optimizers else None
            self._engine = start_engine(self._adapter, inner, config)
        if self._options.stage == 3:
            for part in module.modules():
                part.__deepcopy__ = no_copy(part)  # type: ignore[assignment]
        assert self._original is not None
        self._original.note_added()
        groups = FlatGroups(self._engine, self._world)
        self.state = EngineState(groups, load_full_precision(groups, module, fp32_weights, self._world), self._world)
        if self._options.stage == 3:
            offload = getattr(self._engine.optimizer, "parameter_offload", self._engine.optimizer)
            self.state.gathering = Gathering(module, self._world, offload)
            self._handles = refuse_empty_state(module, self.state.gathering.is_whole)
        if optimizers:
            self._classes = allow_exact_statistics(module) if self._compute_dtype is not None else {}
            fixed = groups.trained | self._left_out
            frozen = [one for one in module.parameters() if id(one) not in fixed]
            following = Following(optimizers[0], groups.inner, frozen, self._name)
            self.update = self._update_class(self._engine, following, self.state, self._name)
            self.update.lent.left_out = self._left_out
            self.state.lent = LentState(optimizers[0], self.state)
        self._watched = list(module.parameters())
        watch(self._watched, LentGradients() if self.update is None else self.update.lent)

    def _config(self, module: nn.Module, training: bool) -> dict[str, Any]:
        """Return the engine's config, with a separate folder for this rank's files on a disk."""
        path = self._options.nvme_path
        if path is not None and self._options.uses_nvme:
            path.mkdir(parents=True, exist_ok=True)
            self._swap_folder = Path(tempfile.mkdtemp(prefix=f"phalanx-rank{self._world.rank}-", dir=path))
        folder = None if self._swap_folder is None else self._swap_folder / "split"
        sizes = [full_size(parameter) for parameter in module.parameters()]
        precision, largest = self._precision if training else None, max(sizes, default=0) or None
        return engine_config(self._options, precision, self._world.size, sum(sizes), largest, swap_folder=folder)

    # ---- in use ---------------------------------------------------------------------------------------------------

    def route(self, step: StepFunction, training: bool) -> StepFunction:
        """Return a function that runs ``step`` through the engine when training, and under stage 3 always.

        Otherwise return ``step`` itself.
        """
        if self._engine is None or self._adapter is None or (not training and self._options.stage < 3):
            return step
        adapter, engine = self._adapter, self._engine

        def run(*args: Any, **kwargs: Any) -> Any:
            engine(step, *args, **kwargs)
            return adapter.take_output()

        if training:
            return explained(run)

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            if adapter.is_running:
                return step(*args, **kwargs)
            # Parameters may stay gathered until the next training step, where autograd does not accept inference
            # tensors.
            grad = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(grad):
                return run(*args, **kwargs)

        return evaluate

    def check_trainable(self, module: nn.Module) -> None:
        """Refuse parameters that were frozen, unfrozen, added, removed or replaced since the start.

        The engine's flat tensors cannot change.

        Args:
            module: the module that was started with.

        Raises:
            ConfigurationError: on all ranks; the parameters are not those of the start.
        """
        now = dict(module.named_parameters())
        changes = [(parameter, "added") for parameter in now.keys() - {known for known, *_ in self._trainable}]
        for parameter_name, parameter, trained in self._trainable:
            found = now.get(parameter_name)
            if found is not parameter:
                changes.append((parameter_name, "removed" if found is None else "replaced"))
            elif trained != parameter.requires_grad:
                changes.append((parameter_name, "frozen" if trained else "unfrozen"))
        if changes:
            parameter_name, change = min(changes)
            remedy = "set requires_grad" if change.endswith("frozen") else "change parameters"
            raise ConfigurationError(
                f"{parameter_name} was {change} during a fit under strategy={self._name!r}, whose flat tensors are "
                f"fixed when the fit starts: {remedy} before the fit, or use strategy='ddp' or 'fsdp'."
            )

    # ---- the end --------------------------------------------------------------------------------------------------

    def gather(self, module: nn.Module) -> bool:
        """Give the module full weights in its original dtype. Collective.

        Stages 1 and 2 hold full weights on every rank. Stage 3 gathers them parameter by parameter according to
        ``gather_weights``: on rank 0, with those of the other ranks on the meta device, on all ranks, or not at all.

        Returns:
            True, on all ranks, if at least one rank got full weights.
        """
        gathers = self._options.gather_weights if self._options.stage == 3 else "all"
        if self.state is None or self._original is None or gathers == "none":
            return False
        self.state.synchronize()
        self.state.stop_gathering()
        with engine_runs:
            gather_weights(module, self.state, self._original.dtypes, gathers == "all" or self._world.is_global_zero)
        return True

    def stop(self, module: nn.Module | None) -> None:
        """Release the engine, and DeepSpeed's references to the tensors. Not collective.

        Args:
            module: the module if it has full weights: DeepSpeed's attributes are removed from it; None leaves it as it
                is.
        """
        unwatch(self._watched)
        if self.state is not None:
            self.state.stop_gathering()
            if self.state.lent is not None:
                self.state.lent.close()
        restore_classes(self._classes)
        for handle in self._handles:
            handle.remove()
        # `stop_engine` collects garbage, which frees the flat tensors only if nothing refers to them any more.
        engine, self._engine = self._engine, None
        self.update = self.state = self._adapter = None
        if engine is not None:
            stop_engine(engine)
        if module is not None and self._original is not None:
            self._original.restore(module)
        if self._swap_folder is not None:
            shutil.rmtree(self._swap_folder, ignore_errors=True)
