"""``TrainerView``: what callbacks, loggers and users read of a Trainer. It changes nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import ConfigurationError
from ..core.registry import CALLBACKS

if TYPE_CHECKING:
    from ..api.callback import Callback
    from ..api.data_module import DataModule
    from ..api.train_module import TrainModule
    from ..core.accumulation import AccumulationSchedule
    from ..core.optimizer_config import SchedulerConfig
    from ..core.progress import Progress
    from ..distributed.world import World
    from ..fabric.fabric import Fabric
    from ..loop.evaluation_loop import EvaluationPlan
    from ..loop.fit_loop import FitLoop
    from ..metrics.logger import Logger
    from ..parallel.strategy import Strategy
    from ..run.run import Run
    from ..system.run_directory import RunDirectory
    from ..watchdog.heartbeat import Heartbeat
    from .settings import Settings

T = TypeVar("T")

METRIC_KINDS = ("callback", "logged", "progress_bar")


@dataclass
class TrainerState:
    """What a Trainer is doing, and how its last run ended: ``"running"``, ``"finished"`` or ``"interrupted"``."""

    stage: str = "fit"
    status: str = "initializing"

    @property
    def finished(self) -> bool:
        """Whether the last run came to its end."""
        return self.status == "finished"


class Setting(Generic[T]):
    """A read-only attribute of a Trainer: one of its settings. Setting it later would change nothing: refused."""

    def __init__(self, read: Callable[[Settings], T]) -> None:
        self._read = read
        self._name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: TrainerView, owner: type) -> T:
        return self._read(trainer.settings)

    def __set__(self, trainer: TrainerView, value: Any) -> None:
        raise ConfigurationError(f"trainer.{self._name} is read when the Trainer is made: give it to Trainer(...).")


class TrainerView:
    """What is known of a Trainer and its run. ``Trainer`` sets it up."""

    settings: Settings
    fabric: Fabric
    callbacks: list[Callback]
    loggers: list[Logger]
    preemption_signals: tuple[str, ...]
    requeue: bool
    time_limit_margin: timedelta
    stall_limits: tuple[float, ...]
    heartbeat: Heartbeat
    directory: RunDirectory
    state: TrainerState
    accumulation: AccumulationSchedule
    seed: int
    run: Run | None
    """The run under way; None between runs."""
    loop: FitLoop | None
    """The loop of the fit under way."""
    datamodule: DataModule | None
    """The DataModule of the current or last run."""
    last_module: TrainModule | None
    last_progress: Progress
    last_metrics: dict[str, dict[str, Tensor]]

    # ---- settings -------------------------------------------------------------------------------------------------

    max_epochs = Setting(lambda settings: settings.max_epochs)
    min_epochs = Setting(lambda settings: settings.min_epochs)
    max_steps = Setting(lambda settings: settings.max_steps)
    min_steps = Setting(lambda settings: settings.min_steps)
    fast_dev_run = Setting(lambda settings: bool(settings.fast_dev_run))
    limit_train_batches = Setting(lambda settings: settings.limits["train"])
    limit_val_batches = Setting(lambda settings: settings.limits["validate"])
    limit_test_batches = Setting(lambda settings: settings.limits["test"])
    limit_predict_batches = Setting(lambda settings: settings.limits["predict"])
    overfit_batches = Setting(lambda settings: settings.overfit_batches)
    check_val_every_n_epoch = Setting(lambda settings: settings.check_val_every_n_epoch)
    val_check_interval = Setting(lambda settings: settings.val_check_interval)
    num_sanity_val_steps = Setting(lambda settings: settings.num_sanity_val_steps)
    log_every_n_steps = Setting(lambda settings: settings.log_every_n_steps)
    gradient_clip_val = Setting(lambda settings: settings.clipping[0])
    gradient_clip_algorithm = Setting(lambda settings: settings.clipping[1])
    default_root_dir = Setting(lambda settings: str(settings.root))

    # ---- ranks ----------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """This process among the ranks."""
        return self.fabric.world

    @property
    def strategy(self) -> Strategy:
        """How work is spread."""
        return self.fabric.strategy

    @property
    def precision(self) -> str:
        """The name of the precision."""
        return self.fabric.precision.name

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return self.fabric.resources.place.rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self.fabric.resources.place.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this process's node."""
        return self.fabric.resources.place.node_rank

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.fabric.resources.world_size

    @property
    def num_devices(self) -> int:
        """Ranks on each node."""
        return self.fabric.resources.devices

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return self.fabric.resources.num_nodes

    # ---- where the run stands -------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """How far the current or last fit has come."""
        return self.run.progress if self.run is not None and self.run.stage == "fit" else self.last_progress

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0; after a fit the number of epochs done."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer updates applied."""
        return self.progress.global_step

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation loop is being tried before training."""
        return self.run is not None and self.run.sanity_checking

    @property
    def training(self) -> bool:
        """Whether ``fit`` is at training, and not at validating."""
        return self.run is not None and self.run.stage == "fit" and not self.run.evaluating

    @property
    def validating(self) -> bool:
        """Whether a validation runs, in ``validate`` or in ``fit``; the sanity check is none."""
        return self._evaluates("validate") or (self._evaluates("fit") and not self.sanity_checking)

    @property
    def testing(self) -> bool:
        """Whether ``test`` runs."""
        return self._evaluates("test")

    @property
    def predicting(self) -> bool:
        """Whether ``predict`` runs."""
        return self._evaluates("predict")

    def _evaluates(self, stage: str) -> bool:
        return self.run is not None and self.run.stage == stage and self.run.evaluating

    @property
    def interrupted(self) -> bool:
        """Whether the last run ended before its end."""
        return self.state.status == "interrupted"

    @property
    def should_stop(self) -> bool:
        """Whether a stop was asked for and agreed on."""
        return self.run is not None and self.run.stop_requested

    @property
    def fired_triggers(self) -> set[str]:
        """The names of the triggers that fired at the last boundary, the same on every rank."""
        return set(self.run.triggers.fired) if self.run is not None else set()

    @property
    def latest_loss(self) -> Any:
        """The loss of the last micro-batch on this rank: a number, or a tensor on its device."""
        return self.run.latest_loss if self.run is not None else None

    # ---- the parts of the run -------------------------------------------------------------------------------------

    @property
    def module(self) -> TrainModule:
        """The module of the current or last run."""
        if self.last_module is None:
            raise ConfigurationError("this Trainer has no module yet: call fit, validate, test or predict.")
        return self.last_module

    lightning_module = module
    model = module

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the running fit."""
        return self.run.optimizers if self.run is not None else []

    @property
    def lr_schedulers(self) -> list[SchedulerConfig]:
        """The schedulers of the running fit, with when they step."""
        return self.run.schedulers if self.run is not None else []

    lr_scheduler_configs = lr_schedulers

    @property
    def checkpoint_callbacks(self) -> list[Callback]:
        """All callbacks that save checkpoints."""
        return [callback for callback in self.callbacks if callback.runs_last]

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first callback that saves checkpoints."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Callback]:
        """All callbacks that stop early."""
        kind = CALLBACKS.load("early_stopping")
        return [callback for callback in self.callbacks if isinstance(callback, kind)]

    @property
    def early_stopping_callback(self) -> Callback | None:
        """The first callback that stops early."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    # ---- files ----------------------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """This run's directory."""
        return self.directory.path

    @property
    def checkpoint_dir(self) -> Path:
        """Where this run's checkpoints go by default."""
        return self.directory.checkpoints

    @property
    def preemption_dir(self) -> Path | None:
        """Where a run saves that is told from outside to end; None where it keeps no checkpoints."""
        saver = self.checkpoint_callback
        if saver is None or self.fast_dev_run:
            return None
        return Path(getattr(saver, "dirpath", None) or self.checkpoint_dir)

    @property
    def log_dir(self) -> str | None:
        """The directory of the first logger that has one."""
        return next((directory for logger in self.loggers if (directory := logger.log_dir)), None)

    @property
    def writes(self) -> bool:
        """Whether this run keeps files."""
        return bool(self.loggers) or self.checkpoint_callback is not None

    # ---- figures --------------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """Everything logged, for callbacks."""
        return self._metrics("callback")

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """What was last sent to the loggers."""
        return self._metrics("logged")

    @property
    def progress_bar_metrics(self) -> dict[str, Tensor]:
        """What was logged with ``prog_bar=True``."""
        return self._metrics("progress_bar")

    def _metrics(self, kind: str) -> dict[str, Tensor]:
        return self.run.metric_view(kind) if self.run is not None else self.last_metrics[kind]

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches of each rank in an epoch; infinite where unknown."""
        end = self.loop.windows.end if self.loop is not None else None
        return math.inf if end is None else end

    @property
    def num_val_batches(self) -> list[int | float]:
        """This rank's batches of each validation loader."""
        plan = self._validation
        if plan is None:
            return []
        lengths = [source.len_local(limit) for source, limit in zip(plan.sources, plan.limits, strict=True)]
        return [math.inf if length is None else length for length in lengths]

    @property
    def val_enabled(self) -> bool:
        """Whether the running fit validates."""
        return self._validation is not None

    @property
    def _validation(self) -> EvaluationPlan | None:
        return self.loop.plan.validation if self.loop is not None else None

    @property
    def is_last_batch(self) -> bool:
        """Whether the micro-batch in progress is the last of its epoch, as far as the length is known."""
        return self.progress.batch_in_epoch >= self.num_training_batches - 1

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps of the whole fit; infinite where unknown."""
        if self.loop is None:
            raise ConfigurationError(
                "estimated_stepping_batches is known while fit runs, from configure_optimizers on: read it there."
            )
        return self.loop.estimated_steps()
