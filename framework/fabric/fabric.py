"""``Fabric``: ranks, strategy and precision for hand-written training loops. The Trainer's loop uses them too.

    fabric = Fabric(strategy="ddp", devices=2, accumulate=4)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    for batch in fabric.setup_dataloaders(loader):
        with fabric.accumulate(model):
            fabric.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()

All methods are here, with their documentation. The longer ones call parts that hold state: ``Prepared`` (what is set
up), ``Training`` (backward, windows of ``accumulate``), ``WindowTraining`` (forward_backward), ``Checkpoints`` and
``Reporting`` (loggers).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint import save
from ..checkpoint.manifest import MODEL
from ..checkpoint.snapshot_slots import AUTO
from ..core.absent_names import lacks, must_be_none
from ..core.accumulation import AccumulationSchedule, resolve_accumulation
from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, unknown
from ..core.interception import intercept_loop
from ..core.optimizer_config import parameters_of
from ..core.precision import DefaultDtype, Precision
from ..distributed.batch_copy import BatchCopy
from ..distributed.collective_errors import on_rank_zero
from ..distributed.control import Triggers
from ..distributed.devices import empty_caches
from ..distributed.gather import gather_rows, join_rows, map_leaves, pad_over_ranks, split_rows, stack_tensors
from ..distributed.rank_zero_first import first_in_turn
from ..distributed.seed import seed_everything
from ..distributed.user_collectives import values_of_present
from ..distributed.world import World
from ..launch import launch_function, launch_script
from ..launch.exit_hooks import install_rank_hooks
from ..launch.restart_policy import why_never_restarted
from ..metrics.logger import Logger
from ..parallel.compilation import compilation, compilation_of
from ..parallel.meta_device import placed_parts
from ..parallel.optimizer_step import Updater
from ..parallel.resources import RankProperties, Resources, resolve_resources
from ..parallel.sequence_part import SequencePart
from ..parallel.strategy import Routed, Strategy
from ..parallel.strategy_checks import check_placed
from ..pretrained import folder_order, load_into, save_folder
from ..pretrained.request import requested
from ..state.module_state import model_state
from ..system.entry_script import can_rerun_script, return_to_directory
from . import contents_of, publish_weights, snapshot_of
from .checkpoints import Checkpoints, Location
from .collectives import Ranks, all_reduce, broadcast, only_when, to_device
from .contents import Filter, full_state
from .engine import Engine, FabricScheduler
from .loaders import FabricLoader, Sharing, skip_first_batches
from .module import unwrap, wrap_module
from .module_run import join_fabric
from .prepared import Prepared
from .reporting import Reporting, accepted
from .setup import NoInitialization, check_objects, check_optimizer, engine_of_optimizer, wrap_optimizer
from .snapshots import LoopSnapshots
from .training import Training
from .window_rules import check_single_pass
from .window_training import Step, WindowTraining

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Any])

ABSENT = {
    "accelerator": "read the device from fabric.device",
    "run": "put the code into a function and call fabric.launch(function)",
    "sharded_model": "build the module in fabric.init_module()",
}
"""Names of Lightning's Fabric that have no counterpart here, with what to use instead."""
_ALL_RANKS = "all ranks take part; for some of them call torch.distributed with your own group"
_REDUCTIONS = ("sum", "mean", "none")


@lacks(ABSENT)
class Fabric(RankProperties):
    """The verbs of training on one rank or many. Every rank must call those marked "Collective", in the same order.

    Args:
        accelerator: ``"auto"``, ``"cpu"``, ``"gpu"``, ``"cuda"``, ``"xpu"``, ``"mps"``, or the type of another backend.
        strategy: a name such as ``"ddp"``, or an object. ``"auto"`` is ``single`` for one rank and ``ddp`` for more.
        devices: ranks on each node: a number, a list of CUDA indices, or ``"auto"``.
        num_nodes: number of nodes.
        precision: a name such as ``"bf16-mixed"``, or a ``Precision``.
        accumulate: micro-batches for each optimizer step inside ``accumulate``, a number or a schedule.
        callbacks: objects whose hooks ``call`` calls, or names of registered ones.
        loggers: loggers that ``log`` writes to: objects or names.
        plugins: must be None; Lightning has the argument.
        compile: the parts of each module to compile: ``"blocks"``, True, or options, as in ``Trainer(compile=...)``.
        parallel: the ranks along each axis of a mesh, such as ``{"tp": 2}``, as in ``Trainer(parallel=...)``.
        max_restarts: how often the ranks of a script are started again after a failure; see ``load_snapshot``.

    Attributes:
        resources: The requested devices, ranks, strategy and precision.
        strategy: The strategy. Each module that is set up gets a clone of it.
        precision: The precision.
        scaler: The loss scaler; None if losses are not scaled, or if the strategy scales them.
        strategy_scales_losses: Whether the strategy scales losses itself, which some strategies do in fp16.
        updater: Applies the updates of a Trainer.

    Raises:
        ConfigurationError: an argument breaks a rule, or does not fit the machine or the launcher.
    """

    # Accelerate's names.
    num_processes = RankProperties.world_size
    process_index = RankProperties.global_rank
    local_process_index = RankProperties.local_rank
    is_main_process = RankProperties.is_global_zero

    _may_be_alone = False
    """Whether rank 0 may use one device alone where a launcher has started several ranks."""

    @names_arguments
    def __init__(
        self,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: int | str | list[int] = "auto",
        num_nodes: int = 1,
        precision: str | int | Precision | None = None,
        accumulate: int | AccumulationSchedule = 1,
        callbacks: Any = None,
        loggers: Any = None,
        plugins: None = None,
        compile: bool | str | Mapping[str, Any] = False,
        parallel: Mapping[str, int] | str | None = None,
        max_restarts: int = 0,
    ) -> None:
        return_to_directory()
        if isinstance(max_restarts, bool) or not isinstance(max_restarts, int) or max_restarts < 0:
            raise ConfigurationError(f"Fabric(max_restarts={max_restarts!r}) must be a number of restarts from 0 on.")
        self._max_restarts = max_restarts
        must_be_none("Fabric(plugins=...)", plugins, "give the strategy and the precision as objects or by name")
        alone = self._may_be_alone
        self.resources = resolve_resources(accelerator, strategy, devices, num_nodes, precision, alone, parallel)
        self.compilation = compilation(compile, self.resources.device_type, self.resources.strategy)
        self.accumulation = resolve_accumulation(accumulate)
        self._reporting = Reporting(self.resources, callbacks, loggers, lambda: self._prepared.updates)
        self._compose()

    def _compose(self) -> None:
        self.strategy, self.precision = self.resources.strategy, self.resources.precision
        scales = self.strategy.traits.owns_loss_scale
        self.scaler = None if scales else self.precision.loss_scaler()
        # Also without a loss scaler, as in 16-true. The strategy must see each overflow to halve its scale.
        self.strategy_scales_losses = scales and self.precision.compute_dtype == torch.float16
        self.updater = Updater(self.strategy, self.scaler)
        self._ranks = Ranks(self.resources)
        self._triggers: Triggers | None = None
        self._fired: set[str] = set()
        self._prepared = Prepared(self.strategy, self.scaler, self.strategy_scales_losses)
        self._training = Training(self._ranks, self._prepared, self.accumulation)
        self._windows = WindowTraining(self._ranks, self._prepared, self._training)
        self._checkpoints = Checkpoints(self._ranks, self._prepared, self._training)
        self._snapshots = LoopSnapshots(self._ranks, self._prepared, self._checkpoints)

    @names_arguments
    def use_strategy(self, strategy: Strategy) -> None:
        """Replace the strategy before anything is set up. The ranks join again through the new one."""
        self._ranks.close()
        self.resources.strategy = strategy
        self._compose()

    # ---- this rank, and starting all ranks ---------------------------------------------------------------------------

    @property
    def _resources(self) -> Resources:
        return self.resources

    @property
    def world(self) -> World:
        """The process group. The first access joins it, which is collective, and fails if ranks are to be launched."""
        return self._ranks.world

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.world.device

    def launch(self, function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Start the ranks if there are to be several and none were started, and run a function in them if given.

        - A script is run again once for each rank, and this process only supervises them.
        - In a notebook, ``function(fabric, *args, **kwargs)`` runs in forked ranks; rank 0's result is returned.
        - Under torchrun, SLURM and other launchers the ranks exist already; the function is called.

        Raises:
            ConfigurationError: there is no script to run again, and no function.
            RankError: a forked rank failed.
        """
        resources, place = self.resources, self.resources.place
        # A process that outlives it is needed for a single rank too.
        is_watched = self._max_restarts > 0 and place.launcher is None and place.size == 1
        if (resources.must_launch or is_watched) and can_rerun_script():
            launch_script(resources.world_size, self._max_restarts, libraries=resources.libraries)
        if self._max_restarts and (reason := why_never_restarted(place.launcher, self._max_restarts)):
            self.print(f"Fabric(max_restarts={self._max_restarts}) has no effect on this run, since {reason}.")
        if resources.must_launch:
            if function is None:
                raise ConfigurationError(
                    f"launch() with devices={self.resources.devices} has no script to run again for each rank: in a "
                    "notebook or an interpreter, put the code into a function and call launch(function)."
                )
            cuda, size = self.resources.device_type == "cuda", self.resources.world_size
            return launch_function(_run_in_rank, (self, function, args, kwargs), size, uses_cuda=cuda)
        install_rank_hooks(self.resources.place)
        _ = self.world
        return None if function is None else function(self, *args, **kwargs)

    @names_arguments
    def free_memory(self, *objects: Any) -> list[None]:
        """Release everything that was set up and empty the caches; return a None for each object, to assign to it.

        Under the ``zero`` strategies, the model of a Fabric that is only dropped stays in memory.
        """
        for part in (self._prepared, self._training, self._checkpoints, self._snapshots):
            part.clear()
        count = len(objects)
        del objects  # the arguments' tuple would keep them alive through the collection
        empty_caches()
        return [None] * count

    # ---- data over ranks ---------------------------------------------------------------------------------------------

    @property
    def part(self) -> SequencePart:
        """Cuts tensors to the part of each sequence that this rank computes: ``fabric.part(tokens)``.

        For ``parallel={"cp": ...}``, where ranks share the sequences of a batch; without, a part is all of it. Cut all
        tensors that have a sequence dim, and give ``backward`` the number of targets in the part.
        """
        _ = self.world
        return self.resources.strategy.part

    @names_arguments
    def to_device(self, obj: Any) -> Any:
        """Move a tensor, a module or a collection of tensors to this rank's device."""
        return to_device(obj, self.world.device)

    @names_arguments
    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked in a new first dim. Collective.

        Args:
            data: a tensor or number, or a collection of them. Where tensors differ in their first dim, the new dim has
                size 1, and the next one holds the rows of all ranks.
            group: must be None; Lightning has the argument.
            sync_grads: let gradients flow back to the rank that each part came from.
        """
        must_be_none("all_gather(group=...)", group, _ALL_RANKS)
        return stack_tensors(self.world, data, sync_grads, self.world.device)

    @names_arguments
    def gather(self, data: Any) -> Any:
        """Return the tensors of all ranks, concatenated along the first dim in rank order. Collective.

        Ranks may have different numbers of rows, and a 0-d tensor counts as one row. Other values are returned as a
        list with one item for each rank; the items of lists count as rows.
        """
        if (present := values_of_present(self.world, "gather", data)) is not None:
            return join_rows(list(present.values()))
        return gather_rows(self.world, data)

    @names_arguments
    def gather_object(self, data: Any) -> list[Any]:
        """Return the items of all ranks' lists in one list; a value that is not a list is one item. Collective."""
        if (present := values_of_present(self.world, "gather_object", data)) is not None:
            return [item for each in present.values() for item in (each if isinstance(each, (list, tuple)) else [each])]
        found: list[Any] = gather_rows(self.world, data, as_objects=True)
        return found

    @names_arguments
    def all_reduce(self, data: Any, op: str = "mean", *, reduce_op: str | None = None, group: None = None) -> Any:
        """Return tensors reduced over all ranks; numbers are reduced as tensors. Collective.

        Args:
            data: a tensor or number, or a collection of them. It is not modified.
            op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
            reduce_op: Lightning's name for ``op``.
            group: must be None; Lightning has the argument.
        """
        must_be_none("all_reduce(group=...)", group, _ALL_RANKS)
        return all_reduce(self.world, data, op if reduce_op is None else reduce_op)

    @names_arguments
    def reduce(self, data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return tensors reduced by ``"sum"`` or ``"mean"`` (or ``"none"``) over ranks, times ``scale``. Collective."""
        if reduction not in _REDUCTIONS:
            raise unknown("reduction", reduction, _REDUCTIONS)
        reduced = data if reduction == "none" else all_reduce(self.world, data, reduction)
        return map_leaves(lambda leaf: leaf * scale if isinstance(leaf, Tensor) else leaf, reduced)

    @names_arguments
    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src``, its tensors on this rank's device. Collective."""
        return broadcast(self.world, obj, src)

    @names_arguments
    def pad_across_processes(self, data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Return tensors padded with ``pad_index`` in ``dim`` to the largest size on any rank. Collective."""
        return pad_over_ranks(self.world, data, dim, pad_index, pad_first)

    @names_arguments
    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Generator[Any, None, None]:
        """Yield this rank's part of a list, tuple, tensor, or dict of them: contiguous and as even as possible.

        With ``apply_padding`` the last item is repeated until all ranks have the same number, so that results can be
        gathered with fixed shapes.
        """
        yield split_rows(inputs, self.resources.place.rank, self.resources.world_size, apply_padding)

    # ---- synchronization and agreement of ranks ----------------------------------------------------------------------

    @names_arguments
    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called this. Collective. ``name`` only documents the call."""
        if values_of_present(self.world, "barrier", None) is None:
            self.world.barrier()

    wait_for_everyone = barrier

    @names_arguments
    def rank_zero_first(self, local: bool = False, timeout: float | None = None) -> AbstractContextManager[None]:
        """Run a block on rank 0 (with ``local`` on the first rank of each node) before the other ranks. Collective.

        Use it for downloads and caches: the first rank fills them, the others find them.

        Args:
            local: let the first rank of each node go first.
            timeout: how many seconds the others wait; None is one day. The limit on collectives does not apply.

        Raises:
            RankError: a first rank failed or took too long. Raised on entering the block, with ``local`` also on
                leaving it. The message holds the first rank's error.
        """
        return first_in_turn(self.world, local, timeout)

    @names_arguments
    def main_process_first(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """Accelerate's name for ``rank_zero_first(timeout=timeout)``. Collective."""
        return first_in_turn(self.world, False, timeout)

    @names_arguments
    def local_main_process_first(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """Accelerate's name for ``rank_zero_first(local=True, timeout=timeout)``. Collective."""
        return first_in_turn(self.world, True, timeout)

    @names_arguments
    def set_trigger(self, name: str = "stop") -> None:
        """Raise a trigger on this rank; the next ``check_trigger`` of that name returns True on all ranks."""
        self._control().set(name)

    @names_arguments
    def check_trigger(self, name: str = "stop") -> bool:
        """Return whether any rank raised the trigger since the last check, and reset it. Collective.

        The result is the same on all ranks.
        """
        self._fired.update(self._control().agree())
        seen = name in self._fired
        self._fired.discard(name)
        return seen

    def _control(self) -> Triggers:
        if self._triggers is None:
            self._triggers = Triggers(self.world)
        return self._triggers

    # ---- code on some ranks ------------------------------------------------------------------------------------------

    @names_arguments
    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self.resources.place.rank == 0:
            print(*args, **kwargs)

    @names_arguments
    def on_process(self, function: Function | None = None, process_index: int = 0) -> Any:
        """Decorator: run the function on one rank and return None on the others."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return only_when(lambda: self.resources.place.rank == process_index, function)

    @names_arguments
    def on_main_process(self, function: Function) -> Function:
        """Decorator: run the function on rank 0 and return None on the others."""
        return only_when(lambda: self.resources.place.rank == 0, function)

    @names_arguments
    def on_local_main_process(self, function: Function) -> Function:
        """Decorator: run the function on the first rank of each node and return None on the others."""
        return only_when(lambda: self.resources.place.local_rank == 0, function)

    @names_arguments
    def on_last_process(self, function: Function) -> Function:
        """Decorator: run the function on the last rank and return None on the others."""
        return only_when(lambda: self.resources.place.rank == self.resources.world_size - 1, function)

    # ---- set-up and batches ------------------------------------------------------------------------------------------

    @names_arguments
    def seed_everything(self, seed: int | None = None, workers: bool = False, verbose: bool = False) -> int:
        """Seed all generators, the same on all ranks, and the order of loaders set up later; return the seed."""
        return self._prepared.take_seed(seed_everything(seed, workers, verbose))

    @names_arguments
    @contextmanager
    def init_module(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Create modules on this rank's device in the precision's parameter dtype.

        Args:
            empty_init: leave parameters uninitialized, for weights that are loaded later.
        """
        with ExitStack() as stack:
            stack.enter_context(self.world.device)
            stack.enter_context(self._prepared.strategy.building())
            stack.enter_context(DefaultDtype(self.precision.parameter_dtype))
            if empty_init:
                stack.enter_context(NoInitialization())
            yield

    @names_arguments
    @contextmanager
    def init_tensor(self) -> Generator[None, None, None]:
        """Create tensors on this rank's device; floating-point ones in the precision's parameter dtype."""
        with self.world.device, DefaultDtype(self.precision.parameter_dtype):
            yield

    @names_arguments
    def setup(
        self, module: nn.Module, *optimizers: Optimizer, scheduler: Any = None, move_to_device: bool = True
    ) -> Any:
        """Prepare a module and its optimizers for training on many ranks. Collective.

        Returns the module, or ``(module, optimizer, ...)`` if optimizers were given, with a ``scheduler`` at the end,
        which is set up as by ``setup_scheduler(scheduler, step_scheduler_with_optimizer=False)``. Under ``fsdp`` a
        submodule may be called directly if all ranks call it.

        Raises:
            ConfigurationError: one of them was set up before, or the strategy does not support it.
        """
        return self._set_up(module, optimizers, scheduler, move_to_device)

    def _set_up(self, module: nn.Module, optimizers: Sequence[Optimizer], scheduler: Any, move_to_device: bool) -> Any:
        shared = check_objects(self._prepared, module, optimizers)
        intercept_loop()
        original, compilation = unwrap(module), compilation_of(module)[1] or self.compilation
        world = self.world
        strategy = self._prepared.strategy.clone()
        check_placed(strategy, original, training=bool(optimizers))
        if move_to_device:
            strategy.to_device(original)
        self.precision.convert_module(original)
        engine = Engine(original, strategy, self._prepared.scaler, self._prepared.engines)
        if compilation is not None:
            engine.compile(compilation)
        # A strategy that builds its own updates cannot add an optimizer later: without one the module is for
        # evaluation. So is one with parts that Accelerate has placed.
        training = bool(optimizers) or not (strategy.traits.takes_one_optimizer or placed_parts(original))
        given = (*optimizers, *(one.optimizer for one in shared))
        ready = strategy.setup(original, given, training=training, routed=Routed.FORWARD)[: len(optimizers)]
        self._prepared.engines.append(engine)
        engine.route_generation(self.precision.forward_context(world.device.type))
        wrapped = wrap_module(engine, self.precision, world.device.type)
        engine.optimizers = [wrap_optimizer(self._prepared, optimizer, engine) for optimizer in ready]
        for one in shared:
            one.add_engine(engine)
        join_fabric(original, self, self._prepared, engine)
        # The loop of a Lightning program decides when to call step.
        schedulers = () if scheduler is None else (self._scheduled(scheduler, False),)
        return (wrapped, *engine.optimizers, *schedulers) if optimizers or schedulers else wrapped

    @names_arguments
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
        ready: M = self._set_up(module, (), None, move_to_device)
        return ready

    @names_arguments
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
            ready.append(wrap_optimizer(self._prepared, optimizer, engine))
            engine.optimizers.append(ready[-1])
        return ready[0] if len(ready) == 1 else tuple(ready)

    @names_arguments
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
        return self._scheduled(scheduler, step_scheduler_with_optimizer, steps_per_update)

    def _scheduled(self, scheduler: Any, with_optimizer: bool, steps_per_update: int = 1) -> FabricScheduler:
        target = getattr(scheduler, "optimizer", getattr(scheduler, "_optimizer", None))
        mine = [one for one in self._prepared.optimizers if target is one or target is one.optimizer]
        if not mine and target is not None:
            raise ConfigurationError(
                f"setup_scheduler: {type(scheduler).__name__} schedules an optimizer that is not set up; call setup or "
                "setup_optimizers with it first."
            )
        ready = FabricScheduler(scheduler, mine or self._prepared.optimizers, with_optimizer, steps_per_update)
        self._prepared.schedulers.append(ready)
        return ready

    @names_arguments
    def setup_schedulers(self, *schedulers: Any, step_scheduler_with_optimizer: bool = True) -> Any:
        """Prepare schedulers; see ``setup_scheduler``. Returns one, or a tuple of several."""
        ready = tuple(self._scheduled(scheduler, step_scheduler_with_optimizer) for scheduler in schedulers)
        return ready[0] if len(ready) == 1 else ready

    @names_arguments
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
        world = self.world
        sharing = Sharing(use_distributed_sampler, split_batches, dispatch_batches, even_batches)
        move: Callable[[Any], Any] | None = None
        if move_to_device and world.device.type != "cpu":
            move = BatchCopy(world.device) if world.device.type == "cuda" else self.to_device
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

    @names_arguments
    def unwrap_model(self, model: M) -> M:
        """Return the user's own module."""
        return unwrap(model)

    @names_arguments
    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Return the loader without its first batches, to resume in the middle of an epoch."""
        return skip_first_batches(dataloader, num_batches)

    @names_arguments
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

    @names_arguments
    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the rows of all ranks for the current batch, without those of filler batches. Collective.

        Call it for each batch, inside the loop over the loader: rows collected over several batches can no longer be
        separated. Ranks may have different numbers of rows. The result is in the order of one process. Values that are
        not tensors (strings, dicts of results) become a list of all ranks' items.
        """
        world = self.world
        valid = world.counts_data and not self._prepared.reading.filler
        return gather_rows(world, input_data, valid, use_gather_object)

    # ---- training ----------------------------------------------------------------------------------------------------

    @names_arguments
    def windows(self, loader: Iterable[Any], size: int | None = None) -> Generator[list[Any], None, None]:
        """Yield the micro-batches of a loader in lists, one for each accumulation window.

        The last list has fewer if the number of batches is not divisible. Filler batches, which a loader that is set up
        yields to ranks without data, are left out, so a list may be shorter than those of other ranks, or empty.

        Args:
            loader: a loader that is set up, or any iterable of batches.
            size: the number of micro-batches in a window; None for that of ``Fabric(accumulate=...)``.

        Raises:
            ConfigurationError: ``size`` is not a whole number of at least 1.
        """
        return self._windows.windows(loader, size)

    @names_arguments
    def forward_backward(
        self,
        step: Step,
        micro_batches: Iterable[Any],
        weights: Iterable[float | Tensor] | None = None,
        model: nn.Module | None = None,
    ) -> Tensor:
        """Compute the gradients of an accumulation window, under every strategy. Never steps an optimizer.

        They are those of the mean loss over all micro-batches of the window and of all ranks, weighted by ``weights``,
        and are added to gradients that exist. They are reduced over ranks once. Collective.

        - Ranks may have different numbers of micro-batches, or none. Where passes contain collectives, ranks with fewer
          of them run further passes with the weight 0, for which the step is given a batch again.
        - Ranks that read the same data, such as those of a pipeline, are given the same micro-batches and weights, as
          loaders that are set up do.
        - Under a pipeline ``step`` runs several times for a micro-batch, on each rank up to the last block that the
          rank holds. It should have no effect other than its result.
        - With ``ep``, a resumed run is bit-identical with this method, and may not be with ``backward``.

        Args:
            step: ``step(micro_batch)`` calls the set-up module and returns the loss, a scalar tensor that is a mean
                over items, or a dict with the key ``"loss"``. It does not call ``backward``.
            micro_batches: those of this rank, on its device.
            weights: for each micro-batch the number of items that its loss is the mean over, such as non-padding
                tokens. Pass them on all ranks or on none. By default all micro-batches weigh the same. Where ranks
                share sequences (``cp``) they are required: the numbers of targets in this rank's part.
            model: the set-up module that is trained, if several are set up.

        Returns:
            The losses without graph, float32 [micro_batches], on every rank.

        Raises:
            ConfigurationError: a weight is invalid or missing, or a window of ``accumulate`` has not ended.
            LoopError: the step does not return a loss, or calls the module in a way that the strategy cannot run.
            DesyncError: on all ranks; ranks that read the same data have different numbers of micro-batches.
        """
        return self._windows.forward_backward(step, micro_batches, weights, model)

    @names_arguments
    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Mark a micro-batch. Inside, optimizers and schedulers act only at the end of a window of micro-batches.

        The window has as many micro-batches as ``Fabric(accumulate=...)`` says, fewer at the end of the loader. Its
        update is that of the weighted mean over all its micro-batches, of all ranks.

        Args:
            models: the modules that take part, by default all that are set up. Each set of models has its own windows.
        """
        return self._training.accumulate(models)

    def backward(
        self, /, loss: Tensor, model: nn.Module | None = None, weight: float | Tensor | None = None, **options: Any
    ) -> None:
        """Compute gradients. Never steps an optimizer.

        Collective. Only inside ``accumulate`` and under ``ddp`` a rank without a loss may leave the call out: its
        ``step`` joins the reduction.

        Args:
            loss: a scalar tensor.
            model: the set-up module of the loss; needed only by strategies that hold one loss scale for each module.
                For a loss that depends on several modules, pass the one whose optimizer steps next.
            weight: the number of items that the micro-batch's mean loss is over, such as non-padding tokens. The update
                is then that of the mean over all items of the window and of all ranks. Pass it on all ranks or on none.
                By default all micro-batches weigh the same. Where ranks share sequences (``cp``) it is required: the
                number of targets in this rank's part.
            options: those of ``Tensor.backward``, such as ``retain_graph``.
        """
        self._training.backward(loss, model, weight, options)

    @names_arguments
    def autocast(self) -> AbstractContextManager[Any]:
        """Return the precision's forward context, for computations outside a set-up module."""
        return self.forward_context() or nullcontext()

    @names_arguments
    def forward_context(self) -> AbstractContextManager[Any] | None:
        """Return the precision's context for forward passes on this rank's device, or None if they need none."""
        return self.precision.forward_context(self.world.device.type)

    @names_arguments
    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Do not reduce gradients over ranks in the passes inside, not at the end of a window of ``accumulate`` either.

        Meant for loops that accumulate without ``accumulate``.
        """
        engine = self._prepared.engine_for(module, "no_backward_sync")
        check_single_pass(engine.strategy, self._training.current, "no_backward_sync")
        return engine.without_sync() if enabled else nullcontext()

    @names_arguments
    def full_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the full gradient of a parameter, averaged over ranks; None if no loss depends on it. Collective.

        Call it between the backward that ends a window and the update, with a parameter as the module holds it now.

        Raises:
            ConfigurationError: the parameter belongs to no module that is set up.
        """
        if not self._prepared.engines:
            # In the Fabric of a Trainer the strategy itself holds the single module.
            return self._prepared.strategy.gradients.full(parameter)
        for engine in self._prepared.engines:
            if engine.owns(parameter):
                return engine.strategy.gradients.full(parameter)
        raise ConfigurationError(
            f"full_gradient was given a tensor of shape {tuple(parameter.shape)} that is not a parameter of a module "
            "that is set up: take it from module.parameters() after setup, not before."
        )

    @names_arguments
    def clip_gradients(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        clip_val: float | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor | None:
        """Clip gradients by norm or by value. Collective.

        Inside ``accumulate`` it acts at the end of a window only. With a loss scale a norm that is not finite is not an
        error: the update is skipped.

        Args:
            module: the module that is set up.
            optimizer: the optimizer whose gradients are clipped.
            clip_val: clamp gradients to ``[-clip_val, clip_val]``.
            max_norm: scale gradients down to this norm.
            norm_type: the order of the norm.
            error_if_nonfinite: raise if the norm is not finite.

        Returns:
            The norm before clipping, a 0-d tensor; None when clipping by value, or where the window does not end.

        Raises:
            ConfigurationError: not exactly one of ``clip_val`` and ``max_norm`` is given.
            NonFiniteError: the norm is not finite and ``error_if_nonfinite`` is true.
        """
        if (clip_val is None) == (max_norm is None):
            raise ConfigurationError(
                f"clip_gradients was given clip_val={clip_val!r} and max_norm={max_norm!r}: give exactly one of them."
            )
        self._prepared.engine_for(module, "clip_gradients")
        mine = [one for one in self._prepared.optimizers if any(optimizer is each for each in (one, one.optimizer))]
        if not mine:
            raise ConfigurationError("clip_gradients was given an optimizer that is not set up; call setup with it.")
        chosen = [(mine[0], parameters_of(mine[0].optimizer))]
        return self._training.clip(chosen, clip_val, max_norm or 0.0, norm_type, error_if_nonfinite)

    @names_arguments
    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip the gradients of these parameters by their joint norm. Collective.

        Args:
            parameters: parameters of modules that are set up, of one optimizer or of several; or such a module.
            max_norm: the norm that they are scaled down to.
            norm_type: the order of the norm.

        Returns:
            The norm before clipping, a 0-d tensor; None where the window does not end.

        Raises:
            ConfigurationError: a parameter has a gradient, and no optimizer that is set up updates it.
        """
        return self._training.clip(self._prepared.chosen_by(parameters), None, max_norm, norm_type, False)

    @names_arguments
    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clamp the gradients of these parameters, or of a module's, to ``[-clip_value, clip_value]``. Collective."""
        self._training.clip(self._prepared.chosen_by(parameters), clip_value, 0.0, 2.0, False)

    @names_arguments
    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale and the window's weight, as the update does. Collective.

        Args:
            optimizer: an optimizer or a list of them; by default all that are set up.
        """
        given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        for one in self._prepared.optimizers:
            wanted = optimizer is None or any(each is one or each is one.optimizer for each in given)
            if wanted and not one.waits:
                one.prepare()
                one.engine.updater.unscale(one.optimizer)

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its window: gradients are reduced and optimizers act."""
        return self._training.ends_window

    @property
    def is_accumulating(self) -> bool:
        """Whether this is inside ``accumulate``."""
        return self._training.inside

    @property
    def gradient_accumulation_steps(self) -> int:
        """The number of micro-batches in the current window."""
        return self._training.window_size

    @names_arguments
    def set_accumulation(self, accumulate: int | Mapping[int, int] | AccumulationSchedule) -> None:
        """Set the number of micro-batches for each optimizer step from now on: a number or a schedule.

        Raises:
            ConfigurationError: it is not a whole number of at least 1.
        """
        self.accumulation = resolve_accumulation(accumulate)
        self._training.set_accumulation(self.accumulation)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last update of any optimizer was skipped."""
        return any(one.step_was_skipped for one in self._prepared.optimizers)

    # ---- callbacks and loggers ---------------------------------------------------------------------------------------

    @property
    def callbacks(self) -> list[Any]:
        """The objects whose hooks ``call`` calls."""
        return self._reporting.callbacks

    @property
    def loggers(self) -> list[Logger]:
        """The loggers that ``log`` writes to."""
        return self._reporting.loggers

    @property
    def logger(self) -> Logger:
        """The first logger.

        Raises:
            ConfigurationError: there is none.
        """
        if not self.loggers:
            raise ConfigurationError("this Fabric has no logger: pass loggers=... to it.")
        return self.loggers[0]

    @names_arguments
    def call(self, hook_name: str, *args: Any, **kwargs: Any) -> None:
        """Call a hook of all callbacks that have it, in order, with those keyword arguments that each one accepts."""
        for callback in self._reporting.callbacks:
            hook = getattr(callback, hook_name, None)
            if callable(hook):
                hook(*args, **accepted(hook, kwargs))

    @names_arguments
    def log(self, name: str, value: Any, step: int | None = None) -> None:
        """Send a metric to all loggers, from rank 0."""
        self._reporting.log_dict({name: value}, step)

    @names_arguments
    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Send metrics to all loggers, from rank 0. ``step`` defaults to the number of updates so far.

        Loggers write in threads of their own. One that fails or hangs does not disturb the loop; the failure is
        printed.
        """
        self._reporting.log_dict(metrics, step)

    @names_arguments
    def end_training(self) -> None:
        """Close the loggers. Call it after the loop; without it they are flushed when the process exits."""
        self._reporting.end_training()

    @contextmanager
    def profile(
        self, /, trace_dir: str | Path | None = None, trace_name: str = "rank", **options: Any
    ) -> Generator[Any, None, None]:
        """Profile a block with ``torch.profiler.profile(**options)``.

        Args:
            trace_dir: a directory in which each rank writes its trace as ``<trace_name>_<n>.json``.
            trace_name: the first part of the names of these files.
            options: those of ``torch.profiler.profile``.
        """
        with torch.profiler.profile(**options) as profiler:
            yield profiler
        if trace_dir is not None:
            directory = Path(trace_dir)
            directory.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(directory / f"{trace_name}_{self.resources.place.rank}.json"))

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @names_arguments
    def save(self, path: Location, state: Mapping[str, Any], filter: Filter | None = None) -> None:
        """Save a dict as a checkpoint: atomic, checksummed, the same under every strategy. Collective.

        Args:
            path: the checkpoint's directory. An existing checkpoint is replaced.
            state: modules, optimizers, anything with ``state_dict`` and ``load_state_dict`` (schedulers, loaders), and
                plain values: numbers, strings, lists, dicts, tensors. The tensors of a single module are saved under
                their own names, those of several are prefixed with the key.
            filter: maps a key to a function of name and value that returns whether this part of the state is saved.

        Raises:
            ConfigurationError: a value cannot be saved.
            NonFiniteError: a weight is NaN or infinite.
            StorageError: the checkpoint cannot be written; in all cases an existing one is left as it was.
        """
        self._checkpoints.save(path, state, filter or {}, None)

    @names_arguments
    def load(
        self,
        path: Location,
        state: dict[str, Any] | nn.Module | Optimizer | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint, also one of a Trainer, into objects and return the rest of its contents. Collective.

        Args:
            path: the checkpoint's directory.
            state: modules, optimizers and other objects, which are restored in place, and plain values, which are
                replaced in the dict; each from what was saved under its key. A single module or optimizer is restored
                from the only one in the checkpoint. Without ``state`` all contents are returned.
            strict: if False, matching tensors are loaded, and a warning lists the mismatches.
            rename: maps the first parts of saved tensor names to the current ones: ``{"net": "body.net"}``.
            weights_only: accepted for programs written for Lightning: nothing is ever unpickled.

        Raises:
            CheckpointError: there is no checkpoint, it is damaged, or it does not match. Raised on all ranks, before
                anything has changed; the message lists every mismatch.
        """
        return self._checkpoints.load(path, state, strict, rename or {})

    @names_arguments
    def load_raw(
        self,
        path: Location,
        obj: nn.Module | Optimizer | None = None,
        strict: bool = True,
        rename: Mapping[str, str] | None = None,
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Tensor]:
        """Return the weights in a checkpoint or in safetensors files, by name. Collective if ``obj`` is given.

        Args:
            path: a checkpoint, a ``.safetensors`` file, or a directory that ``save_model`` or Hugging Face wrote.
            obj: a module to load the weights into.
            strict: as in ``load``.
            rename: as in ``load``.
            weights_only: as in ``load``.

        Raises:
            CheckpointError: there are no readable weights, or they do not match the module. Raised on all ranks if a
                module is given.
        """
        return self._checkpoints.load_raw(path, obj, strict, rename or {})

    @names_arguments
    def save_state(self, output_dir: Location, without: Sequence[nn.Module] = ()) -> None:
        """Save all objects that are set up or registered, and every rank's random generators. Collective.

        Args:
            output_dir: the checkpoint's directory.
            without: modules whose weights are not saved.
        """
        self._checkpoints.save_state(output_dir, {}, without)

    @names_arguments
    def load_state(self, input_dir: Location, without: Sequence[nn.Module] = ()) -> None:
        """Load what ``save_state`` saved. The same objects must be set up and registered, in order. Collective.

        Args:
            input_dir: the checkpoint's directory.
            without: modules whose weights are not loaded.

        Raises:
            CheckpointError: the checkpoint does not match. Raised before anything has changed.
        """
        self._checkpoints.load_state(input_dir, {}, without)

    @names_arguments
    def load_snapshot(self, values: dict[str, Any] | None = None) -> bool:
        """Restore the newest snapshot that an earlier attempt of this launch has taken, if there is one. Collective.

        Call it once everything is set up and registered, before the loop. Modules, optimizers, schedulers, loaders,
        registered objects and the random generators of each rank are restored, as by ``load_state``.

        Args:
            values: is updated with the values that were given to ``snapshot``.

        Returns:
            Whether there was one: False in the first attempt, and without ``Fabric(max_restarts=...)``.

        Raises:
            ConfigurationError: ``values`` is not a dict.
            CheckpointError: the snapshot does not match what is set up. Raised before anything has changed.
        """
        return self._snapshots.load(values)

    @names_arguments
    def snapshot(self, values: Mapping[str, Any] | None = None, every: int | str = AUTO) -> bool:
        """Take a snapshot in memory if one is due after this optimizer step. Collective.

        Call it at the end of each iteration of the loop. It does nothing after iterations without an update, and
        without ``Fabric(max_restarts=...)``. Restarted ranks continue from the newest one: see ``load_snapshot``.

        Args:
            values: plain values to restore, such as the number of the epoch and of the step.
            every: the number of updates between two snapshots, a text such as ``"100 steps"`` or ``"5 min"``, or
                ``"auto"`` for at most 2 % of the time.

        Returns:
            Whether it took one.

        Raises:
            ConfigurationError: ``values`` is not a dict, or ``every`` is not an interval.

        Example:
            >>> place = {"step": 0}
            >>> fabric.load_snapshot(place)
            >>> for step in range(place["step"], 1000):
            ...     train(step)
            ...     fabric.snapshot({"step": step + 1})
        """
        return self._snapshots.take(values, every)

    @names_arguments
    def register_for_checkpointing(self, *objects: Any) -> None:
        """Let ``save_state`` save further objects, in this order.

        Raises:
            ConfigurationError: an object has no ``state_dict`` and ``load_state_dict``.
        """
        self._checkpoints.register(objects)

    @property
    def modules(self) -> list[nn.Module]:
        """All modules that are set up: the user's own objects."""
        return self._prepared.modules

    @names_arguments
    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return a module's weights in full, by name. Collective.

        Returns:
            Under a strategy that shards weights: on the CPU of rank 0, and an empty dict on other ranks. Else those of
            ``model.state_dict()``, on all ranks.
        """
        return full_state(contents_of({"": model}, self._prepared.strategy, self._prepared.engines), self.world)

    @names_arguments
    def load_pretrained(self, model: nn.Module, path: Location, *, strict: bool | None = None) -> None:
        """Load the weights of a Hugging Face folder into a module that is set up. Collective.

        Each rank reads only its own part of each tensor, and casts it to the module's dtype.

        Args:
            model: the module, or a part of it: a model of transformers, or any other.
            path: a folder with ``model.safetensors`` or its shards and index, a ``.safetensors`` file, or a checkpoint.
            strict: whether all names and shapes must match. If False, only matching tensors are loaded, with a warning.
                By default a model of transformers may have layers that the files lack, and the reverse.

        Raises:
            CheckpointError: on all ranks, before anything has changed; the weights cannot be read, or do not match.
        """
        root, into, strategy = self._prepared.holder_of(model)
        request = requested(root, path, None if into is root else into, strict)
        # The warning must show the user's line, which is above this method and the Fabric's call of it.
        load_into(strategy, self.world, root, request, stacklevel=3)

    @names_arguments
    def save_pretrained(
        self,
        model: nn.Module,
        directory: Location,
        tokenizer: Any = None,
        max_shard_size: int | str = "5GB",
        dtype: str | torch.dtype | None = None,
    ) -> Path:
        """Write a model as a folder that ``from_pretrained`` of transformers opens; return the folder. Collective.

        Args:
            model: the module, or a part of it; it is or contains one model of transformers. Of another part the
                weights alone are written.
            directory: the folder; in an existing one the files are replaced once all of them are written.
            tokenizer: a tokenizer or processor to add.
            max_shard_size: the largest size of a file, in bytes or as ``"5GB"``.
            dtype: the dtype in which floating-point tensors are written. Default: that in which updates are applied.

        Raises:
            ConfigurationError: on all ranks; an argument is invalid, there is no such model, or it has adapters of
                peft.
            StorageError: on all ranks; the folder cannot be written.
        """
        root, part, strategy = self._prepared.holder_of(model)
        order = folder_order(directory, None if part is root else part, tokenizer, max_shard_size, dtype)
        sections = {MODEL: model_state(strategy, root)}
        return save_folder(self.world, root, sections, not strategy.traits.replicates, order)

    @names_arguments
    def save_model(
        self,
        model: nn.Module,
        save_directory: Location,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a module's weights as ``model.safetensors``, or shards and an index, for other programs. Collective.

        Existing weights in the directory are replaced, other files are kept.

        Args:
            model: the module.
            save_directory: the directory, created if missing.
            max_shard_size: the size of a file, in bytes or as ``"10GB"``.
            safe_serialization: must be True.

        Raises:
            ConfigurationError: ``max_shard_size`` is not a size, or ``safe_serialization`` is False.
            NonFiniteError: a weight is NaN or infinite.
            StorageError: the directory cannot be written.
        """
        if not safe_serialization:
            raise ConfigurationError("safe_serialization=False asks for a pickle, which phalanx does not write.")
        directory = Path(os.path.abspath(save_directory))
        draft = directory / ".saving"
        world, strategy = self.world, self._prepared.strategy
        contents = contents_of({"model": model}, strategy, self._prepared.engines)
        snapshot = snapshot_of(contents, {}, {}, 0, {}, None, world.is_global_zero)
        on_rank_zero(world, functools.partial(directory.mkdir, parents=True, exist_ok=True))
        save(draft, snapshot, world, sharded=not strategy.traits.replicates, finite=f"in {type(model).__name__}")
        on_rank_zero(world, lambda: publish_weights(draft, directory, max_shard_size))

    # ---- Accelerate's names ------------------------------------------------------------------------------------------

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.global_rank == self.world_size - 1


def _run_in_rank(fabric: Fabric, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    fabric.resources.update_placement()
    result = function(fabric, *args, **kwargs)
    fabric.end_training()  # a forked rank ends without exit handlers, so loggers must flush here
    return result
