"""``Session``: the state of a Trainer across its fits and evaluations."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.callback import Callback, saved_by
from ..core.errors import ConfigurationError, StalledError
from ..core.progress import Progress
from ..report import ending
from ..report.notifications import Notifier
from ..report.verdicts import headline
from ..run.context import RunContext
from ..storage.mirror import Mirror, NoMirror
from ..system.environment import hiding_secrets
from ..watchdog.heartbeat import Heartbeat
from .stage_records import StageRecords

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ..api.contracts import TrainerView
    from ..api.data_module import DataModule
    from ..api.train_module import TrainModule
    from ..core.accumulation import AccumulationSchedule
    from ..fabric.fabric import Fabric
    from ..loop.evaluation_loop import EvaluationPlan
    from ..loop.fit_loop import FitLoop
    from ..metrics.logger import Logger
    from ..parallel.compilation import Compilation
    from ..parallel.resources import Resources
    from ..report.recorder import RunRecorder
    from ..resume.checkpoint_search import Origin
    from ..run.run import Run
    from ..system.run_directory import RunDirectory
    from .resolved_settings import Settings
    from .settings import TrainerSettings

_MOST_EARLY_NOTES = 100
METRIC_KINDS = ("callback", "logged", "progress_bar")


@dataclass(frozen=True)
class TrainerState:
    """The method that a Trainer executes, and its status. Read-only. The names are those of Lightning."""

    fn: str = "fit"
    """The current or last method: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``."""
    status: str = "initializing"
    """``"initializing"``, ``"running"``, ``"finished"`` or ``"interrupted"``."""
    stage: str | None = None
    """The loop that is running: ``"train"``, ``"validate"``, ``"test"``, ``"predict"`` or ``"sanity_check"``. None if
    no method is running. During the validation of a fit, ``fn`` is ``"fit"`` and ``stage`` is ``"validate"``."""

    @property
    def finished(self) -> bool:
        """Whether the last stage ended without an error."""
        return self.status == "finished"


@dataclass
class StageRequest:
    """The arguments of one call of ``fit``, ``validate``, ``test`` or ``predict``."""

    module: TrainModule
    given: dict[str, Any]
    """Loaders by stage, as the user gave them."""
    datamodule: DataModule | None = None
    ckpt_path: str | Path | None = None
    keep_predictions: bool = True
    compilation: Compilation | None = None
    """The compilation of a module that was given as the result of ``torch.compile``."""
    pretrained: str | None = None
    """The path of the pretrained weights to start from."""

    def start_from(self, pretrained: str | Path | None) -> None:
        """Check and record the path of pretrained weights.

        Raises:
            ConfigurationError: it is not a path.
        """
        if pretrained is not None and not isinstance(pretrained, str | Path):
            raise ConfigurationError(f"fit(pretrained={pretrained!r}): give the path of a folder or a file.")
        self.pretrained = None if pretrained is None else str(pretrained)


@dataclass
class Session:
    """The state of a Trainer across its fits and evaluations."""

    view: TrainerView
    """The Trainer, as hooks receive it."""
    requested: TrainerSettings
    """The settings that the program asks for; those in use may be others."""
    settings: Settings
    fabric: Fabric
    loggers: list[Logger]
    callbacks: list[Callback]
    directory: RunDirectory
    accumulation: AccumulationSchedule
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    state: TrainerState = field(default_factory=TrainerState)
    in_progress: str | None = None
    """The stage that has been called and has not returned."""
    seed: int = 0
    began: float = 0.0
    """``time.time()`` at the start of the last stage."""
    mirror: Mirror | NoMirror = field(default_factory=NoMirror)
    """Uploads the run in progress if its directory is in a bucket; on rank 0."""
    run: Run | None = None
    """The run in progress; None between runs."""
    origin: Origin | None = None
    """The start of the current or last fit."""
    loop: FitLoop | None = None
    """The loop of the fit in progress."""
    evaluation: EvaluationPlan | None = None
    """The plan of the evaluation in progress, outside of a fit."""
    module: TrainModule | None = None
    """The module of the current or last stage."""
    compilation: Compilation | None = None
    """The compilation of this module, if it was given as the result of ``torch.compile``."""
    datamodule: DataModule | None = None
    """The DataModule of the current or last stage."""
    records: StageRecords = field(default_factory=StageRecords)
    recorder: RunRecorder | None = None
    """Records the fit in progress, if it writes files; only on rank 0."""
    notifier: Notifier | None = None
    """Sends the events of the fit in progress to the user's servers, if there are any; only on rank 0."""
    first_micro_batch: int | None = None
    """The size of micro-batches that the current fit begins with, if it finds one; None: a rank's whole part."""
    early_notes: list[str] = field(default_factory=list)
    """Lines that were shown before there was a recorder."""
    last_progress: Progress = field(default_factory=Progress)
    last_metrics: dict[str, dict[str, Tensor]] = field(default_factory=lambda: {kind: {} for kind in METRIC_KINDS})

    @property
    def resources(self) -> Resources:
        """The requested devices, strategy and precision."""
        return self.fabric.resources

    @property
    def stage(self) -> str | None:
        """The loop that is running, as in ``TrainerState.stage``."""
        if self.state.status != "running":
            return None
        if self.state.fn != "fit":
            return self.state.fn
        if self.run is not None and self.run.sanity_checking:
            return "sanity_check"
        return "validate" if self.run is not None and self.run.evaluating else "train"

    # ---- a stage, from begin to end -------------------------------------------------------------------------------

    def begin(self, stage: str, request: StageRequest) -> None:
        """Start a stage with the module and the data of a request."""
        self.state = TrainerState(stage, "running")
        self.began = time.time()
        self.records.begin(stage)
        self.early_notes.clear()
        self.records.given_checkpoint = None if request.ckpt_path is None else str(request.ckpt_path)
        self.module, self.datamodule = request.module, request.datamodule
        self.compilation = request.compilation
        if request.datamodule is not None:
            request.datamodule.attach(self.view)

    def use_module(self, module: TrainModule) -> None:
        """Make a module that of the last stage."""
        self.module = module
        module.use_trainer(self.view)

    def attach_run(self, run: Run) -> None:
        """Make a run the current one; an evaluation continues the counters of the last fit."""
        self.run = run
        if run.stage != "fit":
            run.progress = self.last_progress

    def plan_of(self, stage: str) -> EvaluationPlan | None:
        """Return the plan of the current run for an evaluation stage; None if it has none."""
        plan = self.loop.plan.validation if self.loop is not None else self.evaluation
        return plan if plan is not None and plan.stage == stage else None

    def use_seed(self, seed: int) -> None:
        """Derive the data order and the generators of the current run from this seed."""
        self.seed = seed
        if self.run is not None:
            self.run.seed = seed

    def use_callbacks(self, callbacks: Sequence[Callback]) -> None:
        """Replace the callbacks, to which the module of a stage may add its own."""
        self.callbacks = list(callbacks)

    def use_loggers(self, loggers: Sequence[Logger]) -> None:
        """Replace the loggers."""
        self.loggers[:] = loggers
        for logger in self.loggers:
            logger.expect(self.directory.root, self.directory.name)

    def keep_results(self) -> None:
        """Retain the counters, metrics and optimizers of the current run after its end."""
        if self.loop is not None:
            self.records.keep_fit(self.loop)
            self.records.ended_fit = self.loop.ended if self.state.finished else None
        if self.run is not None:
            self.last_progress = self.run.progress
            self.last_metrics = {kind: self.run.metrics.view(kind) for kind in self.last_metrics}

    def forget_run(self) -> None:
        """Reset the current run to None, and end the workers of its loaders."""
        # Not left to the references: of an iterator that the garbage collector frees, torch cannot stop the workers.
        if self.loop is not None:
            self.loop.release_data()
        if self.evaluation is not None:
            self.evaluation.sources = ()
        self.run = self.loop = self.evaluation = self.recorder = self.notifier = None

    # ---- the run's context -----------------------------------------------------------------------------------------

    def context(self) -> RunContext:
        """Return the parts of this session that a run uses."""
        return RunContext(
            view=self.view,
            note=self.note,
            notify=self.notify,
            directory=self.directory,
            heartbeat=self.heartbeat,
            writes=self.writes,
            requeue=self.settings.given.requeue,
            has_failed=lambda: self.state.status == "interrupted",
            datamodule=self.datamodule,
            preemption_directory=self.preemption_directory,
        )

    def note(self, text: str) -> None:
        """Show a line on the console of rank 0, and keep it for the report of a fit."""
        if self.recorder is not None:
            self.recorder.note(hiding_secrets()(text))
        elif self.view.is_global_zero and len(self.early_notes) < _MOST_EARLY_NOTES:
            self.early_notes.append(text)
        self.view.note(text)

    def notify(self, event: str, sentence: str, step: int | None, key: str | None = None) -> None:
        """Send an event of a fit to the user's servers, without waiting; see ``Notifier.send``."""
        if self.notifier is not None:
            self.notifier.send(event, sentence, step, key=key)

    def notify_end(self, outcome: dict[str, Any]) -> None:
        """Send the end of a fit, once its report is written. The supervisor of ranks that have failed sends theirs."""
        is_sent_later = outcome["exit_code"] != 0 and self.resources.place.launcher == "phalanx"
        if self.notifier is not None and not is_sent_later:
            end = ending(self.run_directory, outcome)
            self.notifier.send("end", end.sentence, end.step, end.state)

    def end_stalled(self, message: str, ends: bool) -> None:
        """Record a stall that this process has found itself, in the watchdog's thread.

        Args:
            message: the stacks, and the sentence that names the rank at fault.
            ends: whether the process ends.
        """
        step = self.heartbeat.read().step
        self.notify("stall", headline(message), step if step >= 0 else None)
        if ends:
            # Without a collective or a look at a device: the training thread hangs.
            if self.recorder is not None:
                self.recorder.close(StalledError.exit_code, message)
            if self.notifier is not None:
                self.notify_end({"exit_code": StalledError.exit_code, "stopped": message, "optimizer_steps": step})
                self.notifier.close()

    def record_with(self, recorder: RunRecorder) -> None:
        """Record the fit in progress, including the lines that were shown while it was set up."""
        self.recorder = recorder
        for text in self.early_notes:
            recorder.note(hiding_secrets()(text))

    @property
    def writes(self) -> bool:
        """Whether runs write files."""
        return bool(self.loggers) or self.checkpoint_callback is not None

    @property
    def run_directory(self) -> Path | None:
        """The directory of the run in progress, if it writes files."""
        return self.directory.path if self.writes and self.directory.claimed else None

    @property
    def checkpoint_callback(self) -> Callback | None:
        """The first callback that saves checkpoints."""
        return next((callback for callback in self.callbacks if callback.runs_last), None)

    def checkpoint_directory(self) -> Path:
        """Return the directory of the first callback that saves checkpoints; by default that of the run."""
        given = next((saved.dirpath for saved in saved_by(self.callbacks) if saved.dirpath), None)
        return Path(given or self.directory.checkpoints)

    def preemption_directory(self) -> Path | None:
        """Return the directory of the checkpoint of a preempted run; None if the run saves no checkpoints."""
        if self.checkpoint_callback is None or self.settings.fast_dev_run:
            return None
        return self.checkpoint_directory()

    def attach_loggers(self) -> None:
        """Pass the directory of the run to the loggers."""
        for logger in self.loggers:
            logger.attach(self.directory.root, self.directory.name, self.directory.version)

    # ---- results of forked ranks ----------------------------------------------------------------------------------

    def outcome(self) -> dict[str, Any]:
        """Return the state that a rank sends to the process that forked it."""
        return {
            "state": self.state,
            "progress": self.last_progress,
            "metrics": self.last_metrics,
            "records": self.records.numbers(),
            "directory": (self.directory.version, self.directory.claimed),
            "callbacks": {callback.state_key: callback.state_dict() for callback in self.callbacks},
        }

    def take_outcome(self, outcome: dict[str, Any]) -> None:
        """Restore the outcome that rank 0 has sent."""
        self.state, self.last_progress, self.last_metrics = outcome["state"], outcome["progress"], outcome["metrics"]
        self.records.take_numbers(outcome["records"])
        if self.state.fn == "fit":
            self.records.end_elsewhere()
        self.directory.adopt(*outcome["directory"])
        self.attach_loggers()
        for callback in self.callbacks:
            if (state := outcome["callbacks"].get(callback.state_key)) is not None:
                callback.load_state_dict(state)
