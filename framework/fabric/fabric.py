"""``Fabric``: ranks, strategy and precision for hand-written training loops. The Trainer's loop uses them too.

    fabric = Fabric(strategy="ddp", devices=2, accumulate=4)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    for batch in fabric.setup_dataloaders(loader):
        with fabric.accumulate(model):
            fabric.backward(model(batch))
            optimizer.step()
            optimizer.zero_grad()

A Fabric is composed of parts: ``Collectives`` (gather, reduce, wait, agree), ``Setup`` (modules, optimizers, loaders),
``Training`` (backward, accumulate, clip), ``WindowTraining`` (forward_backward), ``Checkpoints`` (save, load),
``FullWeights`` (for other programs) and ``Reporting`` (callbacks, loggers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch

from ..core.absent_names import lacks, must_be_none
from ..core.accumulation import AccumulationSchedule, resolve_accumulation
from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError
from ..core.precision import Precision
from ..distributed.devices import empty_caches
from ..distributed.world import World
from ..launch import launch_function, launch_script
from ..launch.exit_hooks import install_rank_hooks
from ..metrics.logger import Logger
from ..parallel.compilation import compilation
from ..parallel.optimizer_step import Updater
from ..parallel.resources import RankProperties, Resources, resolve_resources
from ..parallel.strategy import Strategy
from ..system.entry_script import can_rerun_script, return_to_directory
from .checkpoints import Checkpoints
from .collectives import Collectives
from .full_weights import FullWeights
from .prepared import Prepared
from .reporting import Reporting
from .setup import Setup
from .snapshots import Snapshots
from .training import Training
from .verbs import ABSENT, verb
from .window_training import WindowTraining


@lacks(ABSENT)
class Fabric(RankProperties):
    """The verbs of training on one rank or many. Every rank must call those marked "Collective", in the same order.

    Args:
        accelerator: ``"auto"``, ``"cpu"`` or ``"cuda"``.
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

    num_processes = RankProperties.world_size
    process_index = RankProperties.global_rank
    local_process_index = RankProperties.local_rank
    is_main_process = RankProperties.is_global_zero
    main_process_first = verb("_ranks", Collectives.main_process_first)
    local_main_process_first = verb("_ranks", Collectives.local_main_process_first)

    _resolve = staticmethod(resolve_resources)

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
        self.max_restarts = max_restarts
        must_be_none("Fabric(plugins=...)", plugins, "give the strategy and the precision as objects or by name")
        self.resources = self._resolve(accelerator, strategy, devices, num_nodes, precision, parallel=parallel)
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
        self._ranks = Collectives(self.resources)
        self._prepared = Prepared(self.strategy, self.scaler, self.strategy_scales_losses)
        self._setup = Setup(self._ranks, self._prepared, self.precision, self.compilation, self)
        self._training = Training(self._ranks, self._prepared, self.precision, self.accumulation)
        self._windows = WindowTraining(self._ranks, self._prepared, self._training)
        self._checkpoints = Checkpoints(self._ranks, self._prepared, self._training)
        self._snapshots = Snapshots(self._ranks, self._prepared, self._checkpoints)
        self._weights = FullWeights(self._ranks, self._prepared)

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
        is_watched = self.max_restarts > 0 and place.launcher is None and place.size == 1
        if (resources.must_launch or is_watched) and can_rerun_script():
            launch_script(resources.world_size, self.max_restarts, libraries=resources.libraries)
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
        """Release everything that was set up and empty the caches; return a None for each object, to assign to it."""
        for part in (self._prepared, self._training, self._checkpoints, self._snapshots):
            part.clear()
        count = len(objects)
        del objects  # the arguments' tuple would keep them alive through the collection
        empty_caches()
        return [None] * count

    # ---- ranks ----------------------------------------------------------------------------------------------------

    part = property(attrgetter("_ranks.part"), doc="Cuts tensors to the sequence positions of this rank, under ``cp``.")
    to_device = verb("_ranks", Collectives.to_device)
    all_gather = verb("_ranks", Collectives.all_gather)
    gather = verb("_ranks", Collectives.gather)
    gather_object = verb("_ranks", Collectives.gather_object)
    all_reduce = verb("_ranks", Collectives.all_reduce)
    reduce = verb("_ranks", Collectives.reduce)
    broadcast = verb("_ranks", Collectives.broadcast)
    pad_across_processes = verb("_ranks", Collectives.pad_across_processes)
    split_between_processes = verb("_ranks", Collectives.split_between_processes)
    barrier = wait_for_everyone = verb("_ranks", Collectives.barrier)
    rank_zero_first = verb("_ranks", Collectives.rank_zero_first)
    set_trigger = verb("_ranks", Collectives.set_trigger)
    check_trigger = verb("_ranks", Collectives.check_trigger)
    print = verb("_ranks", Collectives.print)
    on_process = verb("_ranks", Collectives.on_process)
    on_main_process = verb("_ranks", Collectives.on_main_process)
    on_local_main_process = verb("_ranks", Collectives.on_local_main_process)
    on_last_process = verb("_ranks", Collectives.on_last_process)

    # ---- set-up and batches ---------------------------------------------------------------------------------------

    seed_everything = verb("_setup", Setup.seed_everything)
    init_module = verb("_setup", Setup.init_module)
    init_tensor = verb("_setup", Setup.init_tensor)
    setup = verb("_setup", Setup.setup)
    setup_module = verb("_setup", Setup.setup_module)
    setup_optimizers = verb("_setup", Setup.setup_optimizers)
    setup_scheduler = verb("_setup", Setup.setup_scheduler)
    setup_schedulers = verb("_setup", Setup.setup_schedulers)
    setup_dataloaders = verb("_setup", Setup.setup_dataloaders)
    unwrap_model = verb("_setup", Setup.unwrap_model)
    skip_first_batches = verb("_setup", Setup.skip_first_batches)
    join_uneven_inputs = verb("_setup", Setup.join_uneven_inputs)
    gather_for_metrics = verb("_setup", Setup.gather_for_metrics)

    # ---- training -------------------------------------------------------------------------------------------------

    windows = verb("_windows", WindowTraining.windows)
    forward_backward = verb("_windows", WindowTraining.forward_backward)
    accumulate = verb("_training", Training.accumulate)
    backward = verb("_training", Training.backward)
    forward_context = verb("_training", Training.forward_context)
    autocast = verb("_training", Training.autocast)
    no_backward_sync = verb("_training", Training.no_backward_sync)
    full_gradient = verb("_training", Training.full_gradient)
    clip_gradients = verb("_training", Training.clip_gradients)
    clip_grad_norm_ = verb("_training", Training.clip_grad_norm_)
    clip_grad_value_ = verb("_training", Training.clip_grad_value_)
    unscale_gradients = verb("_training", Training.unscale_gradients)

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

    # ---- callbacks and loggers ------------------------------------------------------------------------------------

    call = verb("_reporting", Reporting.call)
    log = verb("_reporting", Reporting.log)
    log_dict = verb("_reporting", Reporting.log_dict)
    end_training = verb("_reporting", Reporting.end_training)
    profile = verb("_reporting", Reporting.profile)

    callbacks = property(attrgetter("_reporting.callbacks"), doc="The objects whose hooks ``call`` calls.")

    @property
    def loggers(self) -> list[Logger]:
        """The loggers that ``log`` writes to."""
        return self._reporting.loggers

    @property
    def logger(self) -> Logger:
        """The first logger; without one a ``ConfigurationError`` is raised."""
        return self._reporting.logger

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    save = verb("_checkpoints", Checkpoints.save)
    load = verb("_checkpoints", Checkpoints.load)
    load_raw = verb("_checkpoints", Checkpoints.load_raw)
    snapshot = verb("_snapshots", Snapshots.snapshot)
    load_snapshot = verb("_snapshots", Snapshots.load_snapshot)
    load_pretrained = verb("_weights", FullWeights.load_pretrained)
    save_pretrained = verb("_weights", FullWeights.save_pretrained)
    save_model = verb("_weights", FullWeights.save_model)
    modules = property(attrgetter("_prepared.modules"), doc="All modules that are set up: the user's own objects.")
    full_state_dict = verb("_weights", FullWeights.full_state_dict)
    save_state = verb("_checkpoints", Checkpoints.save_state)
    load_state = verb("_checkpoints", Checkpoints.load_state)
    register_for_checkpointing = verb("_checkpoints", Checkpoints.register_for_checkpointing)

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
