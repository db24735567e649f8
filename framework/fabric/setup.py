"""``SetupVerbs``: setting modules, optimizers, schedulers and loaders up, and what is asked of a batch."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.accumulation import AccumulationSchedule, resolve_accumulation
from ..core.errors import ConfigurationError
from ..core.loss_scaler import LossScaler
from ..core.precision import Precision
from ..distributed.gather import gather_rows
from ..parallel.optimizer_step import Updater
from ..parallel.resources import Resources
from ..parallel.strategy import Strategy, parameters_of
from .collectives import RankVerbs
from .gradient_window import GradientWindow
from .loaders import FabricLoader, Reading, Sharing, SkippedBatches
from .module import FabricModule, engine_of, unwrap, wrap_module
from .objects import Engine, FabricOptimizer, FabricScheduler

M = TypeVar("M", bound=nn.Module)


class SetupVerbs(RankVerbs):
    """What is set up, and the batches of loaders that are."""

    def __init__(self, resources: Resources, accumulate: int | AccumulationSchedule) -> None:
        super().__init__(resources)
        self.strategy: Strategy = resources.strategy
        self.precision: Precision = resources.precision
        self.scaler = self._new_scaler()
        self.updater = Updater(self.strategy, self.scaler)
        self.accumulation = resolve_accumulation(accumulate)
        self._engines: list[Engine] = []
        self._schedulers: list[FabricScheduler] = []
        self._loaders: list[FabricLoader] = []
        self._reading = Reading()
        self._windows: dict[tuple[int, ...], GradientWindow] = {}
        self._window: GradientWindow | None = None
        self._seed: int | None = None

    def use_strategy(self, strategy: Strategy) -> None:
        """Go on with another strategy, before anything is set up; ranks that have met stay together."""
        guarded = self.updater.guarded and self.scaler is None
        self.resources.strategy = self.strategy = strategy
        self.scaler = self._new_scaler()
        self.updater = Updater(strategy, self.scaler, guarded)
        self.leave_world()

    def _new_scaler(self) -> LossScaler | None:
        return None if self.strategy.traits.owns_loss_scale else self.precision.loss_scaler()

    @property
    def strategy_scales_losses(self) -> bool:
        """Whether losses are scaled by the strategy, not by ``scaler``."""
        return self.scaler is None and self.precision.loss_scaler() is not None

    # ---- setting up -----------------------------------------------------------------------------------------------

    def setup(self, module: nn.Module, *optimizers: Optimizer, move_to_device: bool = True) -> Any:
        """Make a module and its optimizers ready for the ranks. Collective.

        Returns the module, or ``(module, optimizer, ...)`` where optimizers were given.

        Raises:
            ConfigurationError: one of them was set up before, or the strategy cannot take them.
        """
        self._check_new(module, optimizers)
        original = unwrap(module)
        _ = self.world
        strategy = self.strategy.clone()
        if move_to_device:
            strategy.to_device(original)
        self.precision.convert_module(original)
        strategy.routes_losses = False
        engine = Engine(original, strategy, self.scaler, self._engines)
        # A strategy that builds its own updates gets no optimizer later: without one the module is for evaluation.
        training = bool(optimizers) or not strategy.traits.takes_one_optimizer
        ready = strategy.setup(original, optimizers, training=training)
        self._engines.append(engine)
        compiled = module if module is not original else original
        wrapped = wrap_module(engine, compiled, self.precision, self.device.type)
        engine.optimizers = [FabricOptimizer(optimizer, engine) for optimizer in ready]
        return (wrapped, *engine.optimizers) if optimizers else wrapped

    def setup_module(self, module: M, move_to_device: bool = True) -> M:
        """Make a module ready for the ranks. Collective."""
        if self.strategy.traits.takes_one_optimizer:
            raise ConfigurationError(
                f"strategy={self.strategy.name!r} takes a module and its optimizer together: call "
                "setup(module, optimizer) instead of setup_module."
            )
        ready: M = self.setup(module, move_to_device=move_to_device)
        return ready

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Make optimizers of modules that are set up ready. Returns one, or a tuple of several.

        Raises:
            ConfigurationError: an optimizer was set up before, or updates no module that is.
        """
        ready = []
        for optimizer in optimizers:
            self._check_optimizer(optimizer)
            engine = self._engine_of_optimizer(optimizer)
            wrapped = FabricOptimizer(optimizer, engine)
            engine.optimizers.append(wrapped)
            ready.append(wrapped)
        return ready[0] if len(ready) == 1 else tuple(ready)

    def setup_scheduler(self, scheduler: Any, step_scheduler_with_optimizer: bool = True) -> Any:
        """Make a scheduler ready: its ``step`` acts only if an update was applied since the last time.

        With ``step_scheduler_with_optimizer=False`` it always acts.

        Raises:
            ConfigurationError: its optimizer is not set up.
        """
        target = getattr(scheduler, "optimizer", getattr(scheduler, "_optimizer", None))
        mine = [one for one in self._optimizers() if target is one or target is one.optimizer]
        if not mine and target is not None:
            raise ConfigurationError(
                f"setup_scheduler: {type(scheduler).__name__} schedules an optimizer that is not set up; call setup or "
                "setup_optimizers with it first."
            )
        ready = FabricScheduler(scheduler, mine or self._optimizers(), step_scheduler_with_optimizer)
        self._schedulers.append(ready)
        return ready

    def setup_schedulers(self, *schedulers: Any, step_scheduler_with_optimizer: bool = True) -> Any:
        """Make schedulers ready; see ``setup_scheduler``. Returns one, or a tuple of several."""
        ready = tuple(self.setup_scheduler(scheduler, step_scheduler_with_optimizer) for scheduler in schedulers)
        return ready[0] if len(ready) == 1 else ready

    def setup_dataloaders(
        self,
        *loaders: Any,
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        split_batches: bool = False,
        dispatch_batches: bool = False,
        even_batches: bool = True,
    ) -> Any:
        """Make loaders ready: shared out over ranks, on the device. Collective. Returns one, or a list of several.

        Args:
            loaders: ``DataLoader`` objects or any other iterables of batches.
            use_distributed_sampler: share the samples out; else each rank reads the loader as it is.
            move_to_device: move batches to the device.
            split_batches: the loader's batch is the global one, of which each rank takes its part.
            dispatch_batches: rank 0 alone reads, and sends the others their batches.
            even_batches: all ranks get the same number of batches; see ``FabricLoader``.
        """
        sharing = Sharing(use_distributed_sampler, split_batches, dispatch_batches, even_batches)
        move = self.to_device if move_to_device and self.device.type != "cpu" else None
        seed = self._agreed_seed()
        ready = []
        for number, loader in enumerate(loaders):
            if isinstance(loader, FabricLoader):
                raise ConfigurationError("setup_dataloaders was given a loader that is set up already.")
            name = f"loader {number} of setup_dataloaders"
            ready.append(FabricLoader(loader, self.world, seed, sharing, move, self._reading, name))
        self._loaders += ready
        return ready[0] if len(ready) == 1 else ready

    def _agreed_seed(self) -> int:
        if self._seed is None:
            self._seed = int(self.world.broadcast_object(torch.initial_seed()))
        return self._seed

    # ---- a batch --------------------------------------------------------------------------------------------------

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader without its first batches: for an epoch that is resumed in its middle."""
        if isinstance(dataloader, FabricLoader):
            return dataloader.skipping(num_batches)
        return SkippedBatches(dataloader, num_batches)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[Any] = (), even_batches: bool | None = None
    ) -> Generator[None, None, None]:
        """Let ranks have different numbers of batches: one that has run out goes on with fillers that weigh nothing.

        Loaders that are set up even themselves out inside, whatever ``even_batches`` says; ``joinables`` is accepted
        for the sake of calls written for Accelerate.
        """
        before, self._reading.joined = self._reading.joined, True
        try:
            yield
        finally:
            self._reading.joined = before

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all ranks for the batch in progress, without those that only fill a rank up. Collective.

        Ranks may have different numbers of rows; the result is in the order of one process. What is no tensor (strings,
        dicts of results) becomes a list of all ranks' items. Call it for each batch, inside the loop over the loader:
        what was collected over several batches no longer tells which rows are whose.
        """
        loader = self._reading.current
        valid = self.world.counts_data and (loader is None or not loader.filler)
        return gather_rows(self.world, input_data, valid, use_gather_object)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's context, for computations outside a set-up module."""
        return self.forward_context() or nullcontext()

    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return the precision's context for forward passes on this rank's device, or None if they need none."""
        return self.precision.forward_context(self.device.type)

    def unwrap_model(self, model: M) -> M:
        """Return the user's own module."""
        return unwrap(model)

    # ---- finding what was set up ----------------------------------------------------------------------------------

    def _optimizers(self) -> list[FabricOptimizer]:
        return [optimizer for engine in self._engines for optimizer in engine.optimizers]

    def _optimizers_of(self, parameters: Any) -> list[FabricOptimizer]:
        if isinstance(parameters, nn.Module):
            parameters = parameters.parameters()
        wanted = {id(each) for each in ([parameters] if isinstance(parameters, Tensor) else parameters)}
        found = [one for one in self._optimizers() if any(id(each) in wanted for each in parameters_of(one.optimizer))]
        if not found:
            raise ConfigurationError("these are no parameters of an optimizer that is set up; call setup with it.")
        return found

    def _engine(self, module: nn.Module, verb: str) -> Engine:
        engine = engine_of(module)
        if engine is None:
            engine = next((each for each in self._engines if each.module is module), None)
        if engine is None or engine not in self._engines:
            raise ConfigurationError(
                f"{verb} was given a {type(module).__name__} that is not set up; call setup with it and use what that "
                "returns."
            )
        return engine

    def _engine_for_backward(self, model: nn.Module | None) -> Engine | None:
        if model is not None:
            return self._engine(model, "backward")
        if len(self._engines) == 1:
            return self._engines[0]
        if len(self._engines) > 1 and self.strategy_scales_losses:
            raise ConfigurationError(
                f"strategy={self.strategy.name!r} with several modules: call backward(loss, model=...) to say which."
            )
        return None

    def _engine_of_optimizer(self, optimizer: Optimizer) -> Engine:
        parameters = parameters_of(optimizer)
        for engine in self._engines:
            if any(engine.owns(parameter) for parameter in parameters):
                return engine
        raise ConfigurationError(
            f"setup_optimizers: {type(optimizer).__name__} updates no parameter of a module that is set up; call "
            "setup_module first, and build the optimizer on what it returns."
        )

    def _check_new(self, module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigurationError(f"setup was given a {type(module).__name__}; it takes a module, then optimizers.")
        original = unwrap(module)
        if isinstance(module, FabricModule) or any(engine.module is original for engine in self._engines):
            raise ConfigurationError(f"this {type(original).__name__} is set up already; use what setup returned.")
        for optimizer in optimizers:
            self._check_optimizer(optimizer)

    def _check_optimizer(self, optimizer: Any) -> None:
        if not isinstance(optimizer, Optimizer):
            raise ConfigurationError(f"a {type(optimizer).__name__} was given as an optimizer to set up.")
        if any(optimizer is one or optimizer is one.optimizer for one in self._optimizers()):
            raise ConfigurationError(f"this {type(optimizer).__name__} is set up already; use what setup returned.")
