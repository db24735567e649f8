"""The read-only properties of ``Trainer``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigurationError
from ..core.registry import CALLBACKS
from ..run.run_metrics import as_numbers
from .data_properties import DataProperties
from .setting_properties import FabricProperties, SettingProperties

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from ..api.callback import Callback
    from ..api.data_module import DataModule
    from ..api.train_module import TrainModule
    from ..core.optimizer_config import SchedulerConfig
    from ..core.progress import Progress
    from ..fabric.fabric import Fabric
    from ..loop.fit_loop import FitLoop
    from ..metrics.logger import Logger
    from ..run.run import Run
    from ..system.run_directory import RunDirectory
    from ..watchdog.heartbeat import Heartbeat
    from .resolved_settings import Settings
    from .session import TrainerState


class TrainerProperties(SettingProperties, DataProperties, FabricProperties):
    """The read-only side of ``Trainer``: its settings, and the state of its session."""

    # ---- the session ----------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The settings, resolved."""
        return self._session.settings

    @property
    def fabric(self) -> Fabric:
        """The Fabric beneath this Trainer."""
        return self._session.fabric

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks in the order of their calls, except those that run last."""
        return self._session.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: Sequence[Callback]) -> None:
        self._session.use_callbacks(callbacks)

    @property
    def loggers(self) -> list[Logger]:
        """All loggers."""
        return self._session.loggers

    @loggers.setter
    def loggers(self, loggers: Sequence[Logger]) -> None:
        self._session.use_loggers(loggers)

    @property
    def state(self) -> TrainerState:
        """The stage in progress, and how the last one ended."""
        return self._session.state

    @property
    def seed(self) -> int:
        """The seed of the data order and the generators of the current or last run."""
        return self._session.seed

    @property
    def run(self) -> Run | None:
        """The run in progress; None between runs."""
        return self._session.run

    @property
    def loop(self) -> FitLoop | None:
        """The loop of the fit in progress."""
        return self._session.loop

    @property
    def datamodule(self) -> DataModule | None:
        """The DataModule of the current or last stage."""
        return self._session.datamodule

    @property
    def directory(self) -> RunDirectory:
        """The directory of the run."""
        return self._session.directory

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of this rank, which the watchdog reads."""
        return self._session.heartbeat

    # ---- progress -------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress:
        """The counters of the current or last fit."""
        fit = self._fit
        return self._session.last_progress if fit is None else fit.progress

    @property
    def _fit(self) -> Run | None:
        """The run in progress if it is a fit."""
        return self.run if self.run is not None and self.run.stage == "fit" else None

    @property
    def current_epoch(self) -> int:
        """The epoch in progress, from 0; after a fit the number of completed epochs."""
        return self.progress.epoch

    @property
    def global_step(self) -> int:
        """Optimizer updates applied."""
        return self.progress.global_step

    @property
    def sanity_checking(self) -> bool:
        """Whether the sanity check of the validation loop is running."""
        return self.run is not None and self.run.sanity_checking

    @property
    def training(self) -> bool:
        """Whether ``fit`` is training, not validating."""
        return self.run is not None and self.run.stage == "fit" and not self.run.evaluating

    @property
    def validating(self) -> bool:
        """Whether a validation is running, in ``validate`` or in ``fit``; excludes the sanity check."""
        return self._evaluates("validate") or (self._evaluates("fit") and not self.sanity_checking)

    @property
    def evaluating(self) -> bool:
        """Whether a validation or a test is running, including the sanity check."""
        return self.validating or self.testing or self.sanity_checking

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
        """Whether the last run ended early."""
        return self.state.status == "interrupted"

    @property
    def received_sigterm(self) -> bool:
        """Whether any rank has received a preemption signal, and the run is about to save and end."""
        return self.run is not None and self.run.preempted_by is not None

    @property
    def should_stop(self) -> bool:
        """Whether a stop was requested and all ranks have agreed on it."""
        return self.run is not None and self.run.stop_requested

    @property
    def fired_triggers(self) -> set[str]:
        """The names of the signals that were handled at the last boundary, the same on every rank."""
        return set(self.run.triggers.fired) if self.run is not None else set()

    @property
    def latest_loss(self) -> Any:
        """The loss of the last micro-batch on this rank: a number, or a tensor on its device."""
        return self.run.latest_loss if self.run is not None else None

    # ---- the parts of the run -------------------------------------------------------------------------------------

    @property
    def module(self) -> TrainModule:
        """The module of the current or last run."""
        if self._session.module is None:
            raise ConfigurationError("this Trainer has no module yet: call fit, validate, test or predict.")
        return self._session.module

    @property
    def lightning_module(self) -> TrainModule | None:
        """The module of the current or last run; None before the first."""
        return self._session.module

    model = lightning_module

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the current or last fit; after a fit that shards its state, an empty list."""
        fit = self._fit
        return self._session.records.optimizers if fit is None else fit.optimizers

    @property
    def lr_schedulers(self) -> list[SchedulerConfig]:
        """The schedulers of the current or last fit, with their intervals, as long as there are ``optimizers``."""
        fit = self._fit
        return self._session.records.schedulers if fit is None else fit.schedulers

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
    def progress_bar_callback(self) -> Callback | None:
        """The first callback that shows a progress bar."""
        kind = CALLBACKS.load("progress_bar")
        return next((callback for callback in self.callbacks if isinstance(callback, kind)), None)

    @property
    def logger(self) -> Logger | None:
        """The first logger."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | None) -> None:
        self._session.use_loggers([] if logger is None else [logger])

    # ---- files ----------------------------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """This run's directory."""
        return self.directory.path

    @property
    def checkpoint_dir(self) -> Path:
        """The default directory of this run's checkpoints."""
        return self.directory.checkpoints

    @property
    def log_dir(self) -> str | None:
        """The directory of the first logger that has one; without loggers ``default_root_dir``."""
        if not self.loggers:
            return self.default_root_dir
        return next((directory for logger in self.loggers if (directory := logger.log_dir)), None)

    @property
    def writes(self) -> bool:
        """Whether this run writes files."""
        return self._session.writes

    # ---- metrics --------------------------------------------------------------------------------------------------

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """All logged values, for callbacks."""
        return self._metrics("callback")

    @property
    def outdated_metrics(self) -> frozenset[str]:
        """The names of ``callback_metrics`` that a validation measured at earlier weights."""
        return self.run.metrics.outdated(self.progress.global_batch) if self.run is not None else frozenset()

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The values that were last sent to the loggers."""
        return self._metrics("logged")

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The values that were logged with ``prog_bar=True``, as numbers. On a GPU, reading them waits for it."""
        return as_numbers(self._metrics("progress_bar"))

    def _metrics(self, kind: str) -> dict[str, Tensor]:
        return self.run.metrics.view(kind) if self.run is not None else self._session.last_metrics[kind]
