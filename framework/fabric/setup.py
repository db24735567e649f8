"""``Setup``: the part of a Fabric that prepares modules, optimizers, schedulers and loaders."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from ..core.errors import ConfigurationError
from ..core.interception import intercept_loop
from ..core.optimizer_config import parameters_of
from ..core.precision import DefaultDtype, Precision
from ..distributed.batch_copy import BatchCopy
from ..distributed.gather import gather_rows
from ..distributed.seed import seed_everything
from ..parallel.compilation import Compilation, compilation_of
from ..parallel.meta_device import placed_parts
from ..parallel.strategy import Routed
from ..parallel.strategy_checks import check_placed
from .collectives import Collectives
from .loaders import FabricLoader, Sharing, skip_first_batches
from .module import unwrap, wrap_module
from .module_run import join_fabric
from .objects import Engine, FabricOptimizer, FabricScheduler
from .prepared import Prepared
from .setup_rules import check_objects, check_optimizer, engine_of_optimizer

M = TypeVar("M", bound=nn.Module)


class Setup:
    """Prepares modules, optimizers, schedulers and loaders for training on many ranks."""

    def __init__(
        self,
        ranks: Collectives,
        prepared: Prepared,
        precision: Precision,
        compilation: Compilation | None,
        fabric: Any,
    ) -> None:
        self._ranks = ranks
        self._fabric = fabric
        self._prepared = prepared
        self._precision = precision
        self._compilation = compilation

    # ---- modules, optimizers, schedulers --------------------------------------------------------------------------

    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True
    ) -> Any:
        """Prepare a module and its optimizers for training on many ranks. Collective.

        Returns the module, or ``(module, optimizer, ...)`` if optimizers were given, with a ``scheduler`` at the end,
        which is set up as by ``setup_scheduler(scheduler, step_scheduler_with_optimizer=False)``.

        Raises:
            ConfigurationError: one of them was set up before, or the strategy does not support it.
        """
        shared = check_objects(self._prepared, module, optimizers)
        intercept_loop()
        original, compilation = unwrap(module), compilation_of(module)[1] or self._compilation
        world = self._ranks.world
        strategy = self._prepared.strategy.clone()
        check_placed(strategy, original, training=bool(optimizers))
        if move_to_device:
            strategy.to_device(original)
        self._precision.convert_module(original)
        engine = Engine(original, strategy, self._prepared.scaler, self._prepared.engines)
        if compilation is not None:
            engine.compile(compilation)
        # A strategy that builds its own updates cannot add an optimizer later: without one the module is for
        # evaluation. So is one with parts that Accelerate has placed.
        training = bool(optimizers) or not (strategy.traits.takes_one_optimizer or placed_parts(original))
        given = (*optimizers, *(one.optimizer for one in shared))
        ready = strategy.setup(original, given, training=training, routed=Routed.FORWARD)[: len(optimizers)]
        self._prepared.engines.append(engine)
        engine.route_generation(self._precision.forward_context(world.device.type))
        wrapped = wrap_module(engine, self._precision, world.device.type)
        engine.optimizers = [self._wrapped(optimizer, engine) for optimizer in ready]
        for one in shared:
            one.add_engine(engine)
        join_fabric(original, self._fabric, self._prepared, engine)
        # The loop of a Lightning program decides when to call step.
        schedulers = () if scheduler is None else (self.setup_scheduler(scheduler, False),)
        return (wrapped, *engine.optimizers, *schedulers) if optimizers or schedulers else wrapped

    def setup_module(self, module: M, move_to_device: bool = True) -> M:
        """Prepare a module for training on many ranks. Collective.

        Raises:
            ConfigurationError: it was set up before, or the strategy needs its optimizer at the same time.
        """
        if self._prepared.strategy.traits.takes_one_optimizer:
            raise ConfigurationError(
                f"strategy={self._prepared.strategy.name!r} takes a module and its optimizer together: call "
                "setup(module, optimizer) instead of setup_module."
            )
        ready: M = self.setup(module, move_to_device=move_to_device)
        return ready

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Prepare optimizers of modules that are set up. Returns one, or a tuple of several.

        Raises:
            ConfigurationError: an optimizer was set up before, or updates no module that is set up.
        """
        ready = []
        for optimizer in optimizers:
            check_optimizer(self._prepared, optimizer)
            engine = engine_of_optimizer(self._prepared, optimizer)
            check_placed(engine.strategy, engine.module, training=True)
            ready.append(self._wrapped(optimizer, engine))
            engine.optimizers.append(ready[-1])
        return ready[0] if len(ready) == 1 else tuple(ready)

    def setup_scheduler(
        self, scheduler: Any, step_scheduler_with_optimizer: bool = True, steps_per_update: int = 1
    ) -> Any:
        """Prepare a scheduler: its ``step`` acts only if an update was applied since the last time.

        Args:
            scheduler: a scheduler of an optimizer that is set up.
            step_scheduler_with_optimizer: if False, ``step`` always acts.
            steps_per_update: how often the original steps each time. Accelerate steps once for each rank, for a length
                in batches of one process.

        Raises:
            ConfigurationError: its optimizer is not set up.
        """
        target = getattr(scheduler, "optimizer", getattr(scheduler, "_optimizer", None))
        mine = [one for one in self._prepared.optimizers if target is one or target is one.optimizer]
        if not mine and target is not None:
            raise ConfigurationError(
                f"setup_scheduler: {type(scheduler).__name__} schedules an optimizer that is not set up; call setup or "
                "setup_optimizers with it first."
            )
        ready = FabricScheduler(
            scheduler, mine or self._prepared.optimizers, step_scheduler_with_optimizer, steps_per_update
        )
        self._prepared.schedulers.append(ready)
        return ready

    def setup_schedulers(self, *schedulers: Any, step_scheduler_with_optimizer: bool = True) -> Any:
        """Prepare schedulers; see ``setup_scheduler``. Returns one, or a tuple of several."""
        ready = tuple(self.setup_scheduler(scheduler, step_scheduler_with_optimizer) for scheduler in schedulers)
        return ready[0] if len(ready) == 1 else ready

    def unwrap_model(self, model: M) -> M:
        """Return the user's own module."""
        return unwrap(model)

    def seed_everything(self, seed: int | None = None, workers: bool = False, verbose: bool = False) -> int:
        """Seed all generators, the same on all ranks, and the order of loaders set up later; return the seed."""
        return self._prepared.take_seed(seed_everything(seed, workers, verbose))

    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create modules on this rank's device in the precision's parameter dtype.

        Args:
            empty_init: leave parameters uninitialized, for weights that are loaded later.
        """
        with ExitStack() as stack:
            stack.enter_context(self._ranks.world.device)
            stack.enter_context(self._prepared.strategy.building())
            stack.enter_context(DefaultDtype(self._precision.parameter_dtype))
            if empty_init:
                stack.enter_context(_NoInitialization())
            yield

    @contextmanager
    def init_tensor(self) -> Generator[None, None, None]:
        """Create tensors on this rank's device; floating-point ones in the precision's parameter dtype."""
        with self._ranks.world.device, DefaultDtype(self._precision.parameter_dtype):
            yield

    # ---- loaders and their batches --------------------------------------------------------------------------------

    def setup_dataloaders(
        self,
        *loaders: Any,
        use_distributed_sampler: bool = True,
        move_to_device: bool = True,
        split_batches: bool = False,
        dispatch_batches: bool = False,
        even_batches: bool = True,
    ) -> Any:
        """Prepare loaders: shard them over ranks, move batches to the device. Collective.

        Returns one, or a list of several.

        Args:
            loaders: ``DataLoader`` objects or any other iterables of batches.
            use_distributed_sampler: shard the samples; if False, each rank reads the loader as it is.
            move_to_device: move batches to the device.
            split_batches: the loader's batch is the global one, of which each rank takes its part.
            dispatch_batches: only rank 0 reads, and sends the other ranks their batches.
            even_batches: all ranks get the same number of batches; see ``FabricLoader``.
        """
        world = self._ranks.world
        sharing = Sharing(use_distributed_sampler, split_batches, dispatch_batches, even_batches)
        move = BatchCopy(world.device) if move_to_device and world.device.type == "cuda" else None
        seed = self._prepared.seed
        if seed is None:
            seed = self._prepared.take_seed(int(world.broadcast_object(torch.initial_seed())))
        ready = []
        for number, loader in enumerate(loaders):
            if isinstance(loader, FabricLoader):
                raise ConfigurationError("setup_dataloaders was given a loader that is set up already.")
            name = f"loader {number} of setup_dataloaders"
            ready.append(FabricLoader(loader, world, seed, sharing, move, self._prepared.reading, name))
        self._prepared.loaders.extend(ready)
        return ready[0] if len(ready) == 1 else ready

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader without its first batches, to resume in the middle of an epoch."""
        return skip_first_batches(dataloader, num_batches)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[Any] = (), even_batches: bool | None = None
    ) -> Generator[None, None, None]:
        """Let ranks have different numbers of batches: a rank that has run out continues with filler batches.

        Loaders that are set up become even inside. ``joinables`` and ``even_batches`` have no effect; calls written for
        Accelerate pass them.
        """
        with self._prepared.reading.evened():
            yield

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all ranks for the current batch, without those of filler batches. Collective.

        Call it for each batch, inside the loop over the loader: rows collected over several batches can no longer be
        separated. Ranks may have different numbers of rows. The result is in the order of one process. Values that are
        not tensors (strings, dicts of results) become a list of all ranks' items.
        """
        world = self._ranks.world
        valid = world.counts_data and not self._prepared.reading.filler
        return gather_rows(world, input_data, valid, use_gather_object)

    def _wrapped(self, optimizer: Optimizer, engine: Engine) -> FabricOptimizer:
        """Return an optimizer of an engine's module, which may update parameters of other modules too."""
        wrapped, parameters = FabricOptimizer(optimizer, engine), set(parameters_of(optimizer))
        for other in self._prepared.engines:
            if not parameters.isdisjoint(other.module.parameters()):
                wrapped.add_engine(other)
        return wrapped


class _NoInitialization(TorchFunctionMode):
    """Skips the functions of ``torch.nn.init``: parameters are loaded later."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)
