"""``TrainingVerbs``: setting modules, optimizers and loaders up, and the way from a loss to an update."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .accumulation import AccumulationSchedule, resolve_accumulation
from .errors import ConfigurationError, NonFiniteError
from .fabric_loaders import FabricLoader, Reading, Sharing, SkippedBatches
from .fabric_objects import Engine, FabricModule, FabricOptimizer, FabricScheduler, engine_of, unwrap, wrap_module
from .gathering import gather_rows
from .gradient_window import GradientWindow, check_weight
from .precision import LossScaler, Precision
from .ranks import RankVerbs
from .resources import Resources
from .strategy import Strategy, parameters_of
from .update import Updater

M = TypeVar("M", bound=nn.Module)


class TrainingVerbs(RankVerbs):
    """From objects of the user's to updates of their weights."""

    def __init__(self, resources: Resources, accumulate: int | AccumulationSchedule) -> None:
        super().__init__(resources)
        self.strategy: Strategy = resources.strategy
        self.precision: Precision = resources.precision
        self.scaler = LossScaler() if self.precision.scaled and not self.strategy.traits.owns_loss_scale else None
        self.updater = Updater(self.strategy, self.scaler)
        self.accumulation = resolve_accumulation(accumulate)
        self._engines: list[Engine] = []
        self._schedulers: list[FabricScheduler] = []
        self._loaders: list[FabricLoader] = []
        self._reading = Reading()
        self._windows: dict[tuple[int, ...], GradientWindow] = {}
        self._window: GradientWindow | None = None
        self._seed: int | None = None

    # ---- setting up -----------------------------------------------------------------------------------------------

    def setup(self, module: nn.Module, *optimizers: Optimizer, move_to_device: bool = True) -> Any:
        """Make a module and its optimizers ready for the ranks. Collective.

        Returns the module, or ``(module, optimizer, ...)`` where optimizers were given.

        Raises:
            ConfigurationError: one of them was set up before, or the strategy cannot take them.
        """
        self._check_new(module, optimizers)
        original = unwrap(module)
        if move_to_device:
            original.to(self.device)
        if self.precision.converts_inputs:
            original.to(self.precision.storage)
        _ = self.world
        strategy = self.strategy.another()
        strategy.routes_losses = False
        engine = Engine(original, strategy, self.scaler, self._engines)
        ready = strategy.setup(original, optimizers, training=True)
        self._engines.append(engine)
        compiled = module if module is not original else original
        wrapped = wrap_module(engine, compiled, self.precision, self.device.type)
        engine.optimizers = [FabricOptimizer(optimizer, engine) for optimizer in ready]
        return (wrapped, *engine.optimizers) if optimizers else wrapped

    def setup_module(self, module: M, move_to_device: bool = True) -> M:
        """Make a module ready for the ranks. Collective."""
        if self.strategy.traits.needs_optimizer_at_setup:
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
        valid = loader is None or not loader.filler
        return gather_rows(self.world, input_data, valid, use_gather_object)

    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's context, for computations outside a set-up module."""
        return self.precision.context(self.device.type) or nullcontext()

    # ---- gradients ------------------------------------------------------------------------------------------------

    def backward(
        self, loss: Tensor, model: nn.Module | None = None, weight: float | Tensor | None = None, **options: Any
    ) -> None:
        """Compute gradients; never steps.

        ``weight`` is how many items the micro-batch's mean loss is over (non-padding tokens, say): the update then is
        that of the mean over all items of the window and of all ranks. Give it on all ranks or on none.

        Args:
            loss: a scalar tensor.
            model: the set-up module it comes from; needed only by strategies that hold one loss scale for each module.
            weight: see above; by default all micro-batches weigh the same.
            options: those of ``Tensor.backward``, such as ``retain_graph``.
        """
        engine = self._engine_for_backward(model)
        loader = self._reading.current
        filler = loader is not None and loader.filler
        given = None if weight is None else float(weight)
        if self._window is not None and self._window.inside:
            factor = self._window.factor(0.0 if filler else 1.0 if given is None else given)
        else:
            factor = self._factor_alone(given, loader)
            self._forget_windows(engine)
        if self.scaler is not None:
            factor *= self.scaler.scale
        strategy = self.strategy if engine is None else engine.strategy
        strategy.backward(loss if factor == 1.0 else loss * factor, **options)

    def _factor_alone(self, weight: float | None, loader: FabricLoader | None) -> float:
        """Return what a loss outside ``accumulate`` is multiplied by: its part in the mean over ranks."""
        if weight is None:
            return 1.0 if loader is None else loader.share
        check_weight(weight)
        own = 0.0 if loader is not None and loader.filler else weight
        total = torch.tensor([own], dtype=torch.float64)
        self.world.control_reduce(total).wait()
        mean = total.item() / self.world.size
        return own / mean if mean else 0.0

    def _forget_windows(self, engine: Engine | None) -> None:
        for each in self._engines if engine is None else [engine]:
            if each.window is not None and each.window.is_closed:
                each.window = None

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Generator[None, None, None]:
        """Mark a micro-batch. Inside, optimizers and schedulers act only at the end of a window of micro-batches.

        The window has as many as ``Fabric(accumulate=...)`` says, fewer at the end of the loader that is being read.
        Its update is that of the weighted mean over all its micro-batches, of all ranks. Without ``models``, all
        modules that are set up take part; each set of models has windows of its own.
        """
        engines = [self._engine(model, "accumulate") for model in models] or self._engines
        key = tuple(sorted(self._engines.index(engine) for engine in engines))
        window, loader = self._window_of(key), self._reading.current
        window.enter(0 if loader is None else loader.epoch, loader is not None and loader.end)
        for engine in engines:
            engine.window = window
            engine.strategy.sync_gradients(window.sync)
        self._window = window
        try:
            yield
        finally:
            window.leave()
            for engine in engines:
                engine.strategy.sync_gradients(True)

    def _window_of(self, key: tuple[int, ...]) -> GradientWindow:
        if key not in self._windows:
            self._windows[key] = GradientWindow(self.world, self.accumulation, self.scaler is not None)
        return self._windows[key]

    @property
    def sync_gradients(self) -> bool:
        """Whether the present micro-batch ends its window: gradients are reduced and optimizers act."""
        return self._window is None or self._window.sync

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches of a window."""
        steps = 0 if self._window is None else self._window.steps
        loader = self._reading.current
        return self.accumulation(0 if loader is None else loader.epoch, steps)

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> Generator[None, None, None]:
        """Keep gradients on this rank in the passes inside, for loops that accumulate by themselves."""
        strategy = self._engine(module, "no_backward_sync").strategy
        strategy.sync_gradients(not enabled)
        try:
            yield
        finally:
            strategy.sync_gradients(True)

    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip gradients to a norm, whose value before is returned, or to a value. Collective.

        Inside ``accumulate`` it acts at the end of a window only. With a loss scale a norm that is not finite is no
        error: the update is left out.

        Raises:
            ConfigurationError: not exactly one of ``clip_val`` and ``max_norm`` is given.
            NonFiniteError: the norm is not finite and ``error_if_nonfinite`` is true.
        """
        if (clip_val is None) == (max_norm is None):
            raise ConfigurationError(
                f"clip_gradients was given clip_val={clip_val!r} and max_norm={max_norm!r}: give exactly one of them."
            )
        self._engine(module, "clip_gradients")
        mine = [one for one in self._optimizers() if any(optimizer is each for each in (one, one.optimizer))]
        if not mine:
            raise ConfigurationError("clip_gradients was given an optimizer that is not set up; call setup with it.")
        return self._clip(mine[0], clip_val, max_norm, norm_type, error_if_nonfinite)

    def _clip(
        self, optimizer: FabricOptimizer, value: float | None, max_norm: float | None, norm_type: float, strict: bool
    ) -> Tensor | None:
        if optimizer.waits:
            return None
        optimizer.prepare()
        engine, parameters = optimizer.engine, parameters_of(optimizer.optimizer)
        engine.updater.unscale(optimizer.optimizer)
        if value is not None and self.scaler is None:
            engine.strategy.clip_by_value(parameters, value)
            return None
        norm = engine.strategy.gradient_norm(parameters, norm_type)
        # Clamping would hide an infinity from the update, which is to be left out for it.
        finite = bool(norm.isfinite()) if strict or self.scaler is not None else True
        if not finite and self.scaler is None:
            raise NonFiniteError(
                f"the norm of the gradients is {norm.item()}. Lower the learning rate, or clip with "
                "error_if_nonfinite=False to go on."
            )
        if value is not None:
            if finite:
                engine.strategy.clip_by_value(parameters, value)
            return None
        if finite:
            engine.strategy.clip_by_norm(parameters, float(max_norm or 0.0), norm)
        return norm

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip the gradients of an optimizer's parameters, or of a module's, to a norm; returns it. Collective."""
        norms = [self._clip(one, None, max_norm, norm_type, False) for one in self._optimizers_of(parameters)]
        found = [norm for norm in norms if norm is not None]
        return None if not found else found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp the gradients of an optimizer's or module's parameters to ``[-clip_value, clip_value]``. Collective."""
        for one in self._optimizers_of(parameters):
            self._clip(one, clip_value, None, 2.0, False)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Make gradients what the update will see: divided by the loss scale and the window's weight. Collective."""
        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for one in self._optimizers():
            wanted = optimizer is None or any(each is one or each is one.optimizer for each in given)
            if wanted and not one.waits:
                one.prepare()
                one.engine.updater.unscale(one.optimizer)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update of any optimizer was left out."""
        return any(one.step_was_skipped for one in self._optimizers())

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
        if len(self._engines) > 1 and self.strategy.traits.owns_loss_scale:
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
