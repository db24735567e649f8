"""``ModelCheckpoint``: saves checkpoints during a fit, and retains the best, the newest and every nth."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..framework.api.callback import Callback
from ..framework.checkpoint.deletion import BackgroundDeletion, hide
from ..framework.checkpoint.retention import CheckpointNames, NameTemplate, Retention
from ..framework.checkpoint.save_request import SaveRequest
from ..framework.core.absent_names import lacks
from ..framework.core.errors import ConfigurationError, MetricError, PhalanxError, is_count
from ..framework.core.foreign_names import MEMBERS
from ..framework.core.intervals import Due
from ..framework.core.wording import counted
from ..framework.metrics.hparams_text import as_yaml
from ..framework.metrics.logger import Logger
from ..framework.metrics.monitor import doubtful_mode, given_mode, missing_metric
from ..framework.report import past_failures
from ..framework.report.evaluations import PREFIX, evaluations_of
from ..framework.storage.cached_url import local_place, portable, url_of
from ..framework.system.atomic_directories import delete_hidden
from ..framework.system.atomic_files import absolute
from .checkpoint_plan import SavePlan, SaveSchedule
from .evaluate import Evaluate
from .last_step import LastStep
from .monitoring import acts_at_epoch_end

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule

DEFAULT_NAME = "{epoch}-{step}"
# More than can wait for their deletion in a bucket.
_MOST_REPLACED = 64


@lacks(MEMBERS["ModelCheckpoint"])
class ModelCheckpoint(Callback):
    """Save checkpoints by epochs, steps or time; retain the best by a metric, the newest, and every nth permanently.

    - Retention: a checkpoint is retained while one of the rules applies: it is among the best ``save_top_k``, among the
      newest ``keep_last``, or selected by ``keep_every_nth``. An old checkpoint is deleted only when the new one is on
      the disk, so there are never fewer than the rules promise.
    - The checkpoint that a fit was given as ``ckpt_path`` is not deleted by that fit, except with ``"auto"``.
    - Without ``monitor`` the newest checkpoint is the best (``save_top_k=1``), or all are retained (-1).
    - A checkpoint that is due between validations is ranked by the next one, if ``monitor`` is a metric of validations.
    - With ``Evaluate(aside=True)``, a ``monitor`` whose name begins with ``eval/`` ranks a checkpoint at the first save
      after its result is known, or at the end of the fit. Until then the checkpoint is retained.
    - ``last.ckpt`` is separate: it is written whenever a checkpoint is due and again at the end of the fit, for any
      value of the metric. It shares its bytes on the disk with the checkpoint that was saved at the same time. A run
      that would end without any checkpoint, as none came due or its metric is not known, saves it too.
    - A checkpoint with weights that are not finite is never written, and one whose metric is NaN is never among the
      best.
    - Rank 0's values and clock decide, so that all ranks save together.
    - A save that fails (a full disk, a removed directory) is reported with the number of bytes needed and free. Older
      checkpoints are unchanged, and training continues. The third failure in a row raises ``StorageError``.
    - Before the first step, writing to the directory is tested, and incomplete files of killed runs are deleted.

    Args:
        dirpath: the directory of the checkpoints; default: ``checkpoints`` in the run's directory.
        filename: a template for names; default ``"{epoch}-{step}"``. Fields: ``epoch``, ``step``, any logged metric.
        monitor: the metric that ranks checkpoints.
        verbose: print a line for each checkpoint.
        save_last: also save ``last.ckpt``; ``"link"`` means the same as True.
        save_top_k: the number of best checkpoints to retain; 0 none, -1 all.
        save_weights_only: save only the model; no run can be resumed from such a checkpoint.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher values are better; default ``"min"``.
        auto_insert_metric_name: put ``name=`` before each value of the filename.
        every_n_train_steps: the number of optimizer steps between saves.
        train_time_interval: the time between saves.
        every_n_epochs: the number of epochs between saves (default: 1 if no other interval is given; 0: never).
        save_on_train_epoch_end: save at the end of training epochs (True) or after validations (False); default:
            after validations if the run does not validate exactly once per epoch.
        enable_version_counter: append ``-v1`` and so on to a name that exists; otherwise replace the checkpoint.
        asynchronous: write in the background; training waits only while the state is copied to memory. The next save
            and the end of the fit wait until it is written. Until then ``best_model_path`` and the other paths may name
            a checkpoint that does not exist yet.
        keep_last: the number of newest checkpoints to retain, for any value of the metric.
        keep_every_nth: retain every nth due checkpoint permanently, counted over the entire run.
        save_on_exception: when the fit ends with an error, save the state after its last optimizer step as
            ``on_exception.ckpt`` in ``dirpath``; see ``OnExceptionCheckpoint``, which also lists what is not restored
            and when nothing is saved.
        every: the interval between saves in any unit: ``"1000 steps"``, ``"2 epochs"``, ``"1e9 tokens"``,
            ``"5e6 samples"`` or ``"30 min"``. Tokens and samples are those of all ranks, and a save is due at the first
            step that reaches the next multiple. ``"auto"`` for an interval of time after which the least time is lost
            to saves and failures, by Young's formula: from the seconds that training waits for a save, and the failures
            that the run has had. A line says what was chosen.
        keep_local: of checkpoints in a bucket, the number of newest ones whose tensors also stay on the local disk;
            None for all. The others are read from the bucket.

    Raises:
        ConfigurationError: an argument is invalid, or two contradict one another.
    """

    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    last_model_path: str
    """The newest ``last.ckpt``; empty if there is none yet."""
    _kept: Retention
    """The paths of the retained checkpoints, by rule."""
    _newest: str
    """The path of the newest checkpoint, which may still be unwritten; empty if there is none yet."""
    _current: float | None
    """See ``current_score``."""
    _has_run: bool
    """Whether a fit has begun since records were loaded or cleared."""
    _saved_step: int
    """The step of the newest save that has not failed; -1 before the first save and after a failed one."""
    _deferred: bool = False
    """Whether a save that came due waits for its metric: for the next validation, or the end of the epoch."""
    _ranks_later: bool = False
    """Whether an evaluation aside gives the metric, some time after the save."""
    _replaced: list[str]
    """Checkpoints that are deleted once the pending save is published. A run resumed from that save deletes those that
    a killed run has left."""

    monitors = True
    collective = True
    runs_last = True
    only_after_errors = False

    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | str | None = None,
        save_top_k: int = 1,
        save_weights_only: bool = False,
        mode: str | None = None,
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        asynchronous: bool = False,
        keep_last: int = 0,
        keep_every_nth: int = 0,
        save_on_exception: bool = False,
        keep_local: int | None = None,
        every: str | int | None = None,
    ) -> None:
        if save_last not in (None, True, False, "link"):
            raise ConfigurationError(f"ModelCheckpoint(save_last={save_last!r}): give True, False or 'link'.")
        self.mode = given_mode("ModelCheckpoint", mode)
        self._doubt = doubtful_mode("ModelCheckpoint", monitor, mode)
        self._given_dirpath = None if dirpath is None else str(absolute(local_place(dirpath)))
        self.dirpath = self._given_dirpath
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.save_on_exception = save_on_exception
        if keep_local is not None and not is_count(keep_local, 0):
            raise ConfigurationError(f"ModelCheckpoint(keep_local={keep_local!r}): give a number, or None for all.")
        self.keep_local = keep_local
        self._last_step = LastStep()
        self.auto_insert_metric_name = auto_insert_metric_name
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.enable_version_counter = enable_version_counter
        self._schedule = SaveSchedule(every_n_train_steps, every_n_epochs, train_time_interval, every)
        self.counted_intervals = () if self._schedule.units is None else (self._schedule.units,)
        self._due: Due | None = None
        """Whether a save by tokens or samples is due; None for another interval."""
        self._failures = (0, 0.0)
        """How often the run has failed before, and in how many seconds, for ``every="auto"``; on rank 0."""
        self._template = self._as_template(filename or DEFAULT_NAME)
        self.asynchronous = asynchronous
        self._kept = Retention(save_top_k, self.mode, monitor is not None, keep_last, keep_every_nth)
        self._clear_records()
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._first_step = self._seen_step = step
        self._saved_step = -1
        self._validated = False
        self._has_lost = False
        # Whether a stop has cut short an epoch at whose end a save was due.
        self._is_cut = False
        self._came_due = False
        self._schedule.restart_clock()

    @property
    def every_n_epochs(self) -> int:
        """The number of epochs between saves; 0 for never."""
        return self._schedule.epochs

    @property
    def state_key(self) -> str:
        return self._described({"dirpath": self._given_dirpath and os.path.basename(self._given_dirpath)})

    @property
    def common_key(self) -> str:
        # Rank 0 chooses the paths, and a folder of a rank's own, such as a temporary one, has no effect.
        return self._described({})

    def _described(self, folder: dict[str, Any]) -> str:
        settings = {
            "monitor": self.monitor,
            "mode": self.mode,
            "every_n_train_steps": self._schedule.steps,
            "every_n_epochs": self.every_n_epochs,
            "train_time_interval": self._schedule.identity,
            "filename": self.filename,
            **folder,
        }
        if self._schedule.units is not None:
            settings["every"] = str(self._schedule.units)
        return f"ModelCheckpoint({', '.join(f'{name}={value!r}' for name, value in settings.items())})"

    @property
    def saves_into(self) -> tuple[Path, Callable[[str], bool]] | None:
        """The given directory, and a check for names of this callback; None for the run's own directory."""
        return None if self._given_dirpath is None else (Path(self._given_dirpath), self._names.gives)

    @property
    def needed_metrics(self) -> list[str]:
        return [*self._template.metrics, *([self.monitor] if self.monitor and not self._ranks_later else [])]

    @property
    def ranked_metric(self) -> tuple[str, str, float | None] | None:
        if self.monitor is None:
            return None
        score = self.best_model_score
        return self.monitor, self.mode, None if score is None else float(score)

    @property
    def saved_checkpoints(self) -> ModelCheckpoint:
        return self

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def wants(self, hook: str) -> bool:
        if hook == "on_train_batch_end":
            return self._schedule.within_epochs or self.save_on_exception
        if hook in ("on_before_optimizer_step", "on_exception"):
            return self.save_on_exception
        return super().wants(hook)

    def setup(self, trainer: TrainerView, module: TrainModule, stage: str) -> None:
        if stage == "fit" and self._has_run:
            # Those of another fit, such as another fold. A resumed fit loads its own from the checkpoint.
            self._clear_records()
        if self._given_dirpath is None and (stage == "fit" or self.dirpath is None):
            self.dirpath = os.path.abspath(trainer.checkpoint_dir)

    def on_fit_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._has_run = True
        evaluations = [callback.aside for callback in trainer.callbacks if isinstance(callback, Evaluate)]
        self._ranks_later = bool(evaluations) and all(evaluations) and (self.monitor or "").startswith(PREFIX)
        if self._doubt is not None:
            trainer.note(self._doubt)
        if not trainer.fast_dev_run and (self._kept.saves or self.save_last):
            assert self.dirpath is not None
            trainer.prepare_saves(Path(self.dirpath), self._names.gives, self.save_weights_only, self.asynchronous)

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._begin(trainer.global_step)
        units = self._schedule.units
        self._due = None if units is None else Due(units, trainer, self.state_key)
        self._forget_missing(trainer)
        if self._schedule.is_auto and trainer.is_global_zero:
            self._failures = past_failures(trainer.checkpoint_dir.parent)
        if self.save_on_exception:
            self._last_step.begin(trainer)

    def on_before_optimizer_step(self, trainer: TrainerView, module: TrainModule, optimizer: Optimizer) -> None:
        self._last_step.update_begins(trainer)

    def on_exception(self, trainer: TrainerView, module: TrainModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit" and not trainer.fast_dev_run and self.dirpath is not None:
            self._last_step.save(trainer, Path(self.dirpath, f"on_exception{self.FILE_EXTENSION}"), exception)

    def on_train_batch_end(
        self, trainer: TrainerView, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        # Within a window, or after a skipped update, there is no new state to save.
        if step != self._seen_step:
            self._seen_step = step
            is_due = self._schedule.step_is_due(step) or (self._due is not None and self._due.reached())
            if is_due or (self._schedule.interval is not None and self._its_time(trainer)):
                self._save_or_defer(trainer)
        if self.save_on_exception and not trainer.fast_dev_run:
            self._last_step.batch_ends(trainer)

    def on_validation_end(self, trainer: TrainerView, module: TrainModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._validated = True
        at_epoch_end = acts_at_epoch_end(trainer, self.save_on_train_epoch_end)
        if self._deferred or (not at_epoch_end and self._schedule.epoch_is_due(trainer.current_epoch)):
            self._save_or_defer(trainer)

    def on_train_epoch_end(self, trainer: TrainerView, module: TrainModule) -> None:
        at_epoch_end = acts_at_epoch_end(trainer, self.save_on_train_epoch_end)
        is_due = self._schedule.epoch_is_due(trainer.current_epoch)
        # A stop has cut the epoch short: it has no validation, and metrics of training are those of a part of it.
        is_cut = self.monitor is not None and not trainer.progress.epoch_ended
        if self._deferred or (at_epoch_end and is_due):
            self._save_or_defer(trainer, last_chance=not is_cut and (self._validated or not trainer.val_enabled))
        elif is_cut and is_due:
            self._is_cut = True

    def on_train_end(self, trainer: TrainerView, module: TrainModule) -> None:
        trainer.finish_saves()
        self._last_step.end()
        step = trainer.global_step
        # A run that was resumed at its end has trained nothing, but its checkpoints may have been deleted.
        is_saved = step == self._saved_step or (step == self._first_step and not self._has_lost)
        if is_saved or trainer.fast_dev_run:
            return
        # A run must not end without any checkpoint because none came due, or because its metric is not known.
        saves = self._kept.saves and self._schedule.saves and not self.save_last
        is_unknown = self._deferred or self._is_cut
        is_only_one = saves and not self._kept.paths and (is_unknown or not self._came_due)
        if self.save_last or is_only_one:
            self._save(trainer, replace(self._plan(trainer, is_end=True), path="", counts=False))
        if is_only_one:
            why = f"without a value of {self.monitor!r} for its weights" if is_unknown else "before a save was due"
            trainer.note(f"The run ends at step {step} {why}. They were saved as {self.last_model_path}, unranked.")

    def on_fit_end(self, trainer: TrainerView, module: TrainModule) -> None:
        # The evaluation aside has ended before: this callback is called last.
        if not self._ranks_later or trainer.fast_dev_run:
            return
        before = self._kept.paths
        plan = SavePlan(arrived=self._arrived(trainer) if trainer.is_global_zero else {}).converted(portable)
        self._rank(trainer.world.broadcast_object(plan).converted(lambda path: str(local_place(path))))
        if not trainer.is_global_zero:
            return
        for text in self._remove(before - self._spared(trainer), delete_hidden):
            trainer.note(text)
        if unknown := len(self._kept.waiting):
            trainer.note(
                f"The run ends without a value of {self.monitor!r} for {counted(unknown, 'checkpoint')}: they are "
                "retained, unranked."
            )

    def _its_time(self, trainer: TrainerView) -> bool:
        """Whether the interval has passed by rank 0's clock; a signal informs all ranks at the next step."""
        trigger = f"save by {self.state_key}"
        if trigger in trainer.fired_triggers:
            return True
        # Raised again until the save is done, since a boundary inside a window cannot save.
        if trainer.is_global_zero and self._schedule.time_is_up():
            trainer.raise_trigger(trigger)
        return False

    # ---- plans, saves and deletions ---------------------------------------------------------------------------------

    def _save_or_defer(self, trainer: TrainerView, last_chance: bool = False) -> None:
        if trainer.fast_dev_run or (trainer.global_step == self._saved_step and not self._deferred):
            return
        self._came_due = True
        # The plan depends on the result of the previous save.
        trainer.finish_saves()
        self._schedule.restart_clock()
        plan = self._plan(trainer)
        if plan.missing is not None and last_chance and not plan.waits:
            raise MetricError(plan.missing)
        self._deferred = plan.missing is not None
        # ``last.ckpt`` needs no metric and is saved now. It holds the deferral: a run that is resumed from it validates
        # first, and saves then.
        if plan.missing is None or trainer.global_step != self._saved_step:
            self._save(trainer, plan)

    def _plan(self, trainer: TrainerView, is_end: bool = False) -> SavePlan:
        """Return rank 0's plan for the save; ``is_end``: of ``last.ckpt`` in any case. Collective."""
        own = self._own_plan(trainer, is_end).converted(portable) if trainer.is_global_zero else SavePlan()
        return trainer.world.broadcast_object(own).converted(lambda path: str(local_place(path)))

    def _own_plan(self, trainer: TrainerView, is_end: bool) -> SavePlan:
        logged, names = trainer.callback_metrics, self._names
        metrics: dict[str, Any] = {**logged, "epoch": trainer.current_epoch, "step": trainer.global_step}
        # A checkpoint that is not in the records belongs to another run.
        saves_last = self.save_last or is_end
        last = names.free(self.dirpath, metrics, self.last_model_path, names.last) if saves_last else ""
        if not self._kept.saves:
            return SavePlan(last)
        for name in self.needed_metrics:
            if name not in metrics:
                return SavePlan(last, missing=str(missing_metric("ModelCheckpoint", name, logged)))
        if self._ranks_later:
            accepted = self._kept.best.k != 0 or self._kept.accepts(None)
            path = names.free(self.dirpath, metrics, "") if accepted else ""
            return SavePlan(last, path, counts=True, saved_at=time.time(), arrived=self._arrived(trainer))
        if self.monitor in trainer.outdated_metrics:
            return SavePlan(last, missing=f"{self.monitor!r} was measured at earlier weights.", waits=True)
        score = float(metrics[self.monitor]) if self.monitor is not None else None
        accepted = self._kept.accepts(score)
        path = names.free(self.dirpath, metrics, self._kept.gives_way) if accepted else ""
        return SavePlan(last, path, score, counts=True)

    def _arrived(self, trainer: TrainerView) -> dict[str, float]:
        """Return the results of checkpoints that wait for theirs, by path; on rank 0."""
        waiting = self._kept.waiting
        results = evaluations_of(trainer.run_dir) if waiting else []
        # An earlier time is that of other weights of the same step, which were trained again.
        return {
            path: each.values[self.monitor]
            for path, (step, since) in waiting.items()
            for each in results
            if self.monitor in each.values and each.step == step and each.time >= since
        }

    def _rank(self, plan: SavePlan) -> None:
        """Rank earlier checkpoints whose scores have become known."""
        for path, score in plan.arrived.items():
            self._kept.rank(path, score)
            self._current = score

    def _spared(self, trainer: TrainerView) -> set[str]:
        """Return the paths that are not deleted."""
        # A checkpoint that the user resumes from by name stays: it may be the start of several runs.
        return {"", *self._kept.paths, self.last_model_path, trainer.named_checkpoint or ""}

    # ---- records ----------------------------------------------------------------------------------------------------

    @property
    def best_model_path(self) -> str:
        """The checkpoint with the best metric; without ``monitor`` the newest. Empty if there is none yet."""
        return self._kept.best.best if self.monitor is not None else self._newest

    @property
    def best_model_score(self) -> Tensor | None:
        """The best metric, a 0-d float64 tensor; None if there is none yet, or without ``monitor``."""
        return _as_tensor(self._kept.best.scores.get(self._kept.best.best))

    @property
    def best_k_models(self) -> dict[str, Tensor]:
        """The best checkpoints and their metrics."""
        return {path: torch.tensor(score, dtype=torch.float64) for path, score in self._kept.best.scores.items()}

    @property
    def kth_best_model_path(self) -> str:
        """The worst of the best ``save_top_k`` checkpoints, of all with ``save_top_k=-1``; empty if there are fewer."""
        return self._kept.best.kth

    @property
    def kth_value(self) -> Tensor:
        """The metric that the next checkpoint must improve on: exceed for ``max``, fall below for ``min``.

        Infinite while fewer than ``save_top_k`` are retained; a 0-d float64 tensor.
        """
        room = math.inf if self.mode == "min" else -math.inf
        return torch.tensor(self._kept.best.scores.get(self.kth_best_model_path, room), dtype=torch.float64)

    @property
    def current_score(self) -> Tensor | None:
        """The metric when a checkpoint was last due, whether or not it was written: a 0-d float64 tensor.

        None before the first, or without ``monitor``. A failed save restores the previous one.
        """
        return _as_tensor(self._current)

    def to_yaml(self, filepath: str | os.PathLike[str] | None = None) -> None:
        """Write ``best_k_models`` as YAML; by default to ``best_k_models.yaml`` in ``dirpath``."""
        target = Path(self.dirpath or os.curdir, "best_k_models.yaml") if filepath is None else Path(filepath)
        scores = {path: float(score) for path, score in self.best_k_models.items()}
        target.write_text(as_yaml(scores), encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        return {
            "dirpath": self.dirpath,
            **self._kept.state_dict(),
            "newest": self._newest,
            "best_model_path": self.best_model_path,
            "last_model_path": self.last_model_path,
            "monitor": self.monitor,
            "current_score": self._current,
            "replaced": list(self._replaced),
            "deferred": self._deferred,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._has_run = False

        # If the directory was moved, its checkpoints are found in the new place.
        def here(path: str) -> str:
            before = state["dirpath"]
            if not path or not before or self.dirpath is None or not Path(path).is_relative_to(before):
                return path
            moved = os.path.join(self.dirpath, os.path.relpath(path, before))
            return moved if os.path.exists(moved) else path

        # Earlier versions have saved the list under this name.
        state = {"replaced": state.get("giving_way", []), **state}
        waiting = {here(path): since for path, since in state.get("waiting_models", {}).items()}
        moved = {
            **state,
            "waiting_models": waiting,
            "best_k_models": {here(path): score for path, score in state["best_k_models"].items()},
        }
        for name in ("newest_models", "kept_for_ever", "replaced"):
            if name in state:
                moved[name] = [here(path) for path in state[name]]
        moved.update({name: here(state[name]) for name in ("newest", "last_model_path")})
        self._restore(moved)
        if self.dirpath is None:
            self.dirpath = state["dirpath"]

    def _clear_records(self) -> None:
        """Forget the checkpoints of earlier fits, which stay on the disk."""
        self._kept.clear()
        self.last_model_path = self._newest = ""
        self._current = None
        self._replaced = []
        self._has_run = self._deferred = False

    def _restore(self, state: dict[str, Any]) -> None:
        """Restore the records from a state dict: of a checkpoint, or of the moment before a failed save."""
        self._kept.load_state_dict(state)
        self._newest, self.last_model_path = state["newest"], state["last_model_path"]
        self._current = state["current_score"]
        self._replaced = list(state["replaced"])
        self._deferred = bool(state.get("deferred", False))

    # ---- saves ------------------------------------------------------------------------------------------------------

    def _save(self, trainer: TrainerView, plan: SavePlan) -> None:
        """Save according to a plan; the records are updated first, as they are part of the checkpoint. Collective."""
        before, previous, targets = self.state_dict(), {*self._kept.paths, self.last_model_path}, plan.targets
        self._record(plan, trainer.global_step)
        if not targets:
            self._report(trainer, plan)
            return
        spared = {*targets, *self._spared(trainer)}
        replaced = sorted(previous - spared)
        if self.dirpath is not None and url_of(self.dirpath) is not None:
            # They are deleted in the bucket some time after this, and a machine that is lost until then cannot.
            earlier = [path for path in self._replaced if path not in spared and path not in replaced]
            replaced = [*earlier, *replaced][-_MOST_REPLACED:]
        self._replaced = replaced
        self._saved_step = trainer.global_step
        request = SaveRequest(
            Path(targets[0]),
            self.save_weights_only,
            self.asynchronous,
            also=Path(targets[1]) if len(targets) > 1 else None,
            failure_key=self.state_key,
            prune=partial(self._prune, set(self._replaced)),
            on_done=partial(self._finished, trainer, plan, before),
        )
        began = time.monotonic()
        trainer.request_save(request)
        if self._schedule.is_auto and trainer.is_global_zero:
            seconds = time.monotonic() - began
            if sentence := self._schedule.adapt(seconds, *self._failures, trainer.world_size):
                trainer.note(sentence)

    def planned_saves(self, ranks: int) -> str | None:
        """Return a sentence on the saves of ``every="auto"`` in a run of so many ranks; None for other intervals."""
        return self._schedule.prospect(ranks)

    def _record(self, plan: SavePlan, step: int) -> None:
        """Add a checkpoint to the records before it is saved, after those of which the score has become known."""
        self._rank(plan)
        if plan.score is not None:
            self._current = plan.score
        if plan.last:
            self.last_model_path = plan.last
        if plan.counts:
            self._kept.count()
        if plan.path:
            self._newest = plan.path
            self._kept.add(plan.path, plan.score)
            if plan.saved_at is not None and self.save_top_k != 0:
                self._kept.wait(plan.path, step, plan.saved_at)

    def _finished(
        self, trainer: TrainerView, plan: SavePlan, before: dict[str, Any], error: PhalanxError | None
    ) -> None:
        """Record the result of a save, on every rank."""
        if error is not None:
            self._restore(before)
            self._saved_step = -1
            return
        if trainer.is_global_zero:
            self._inform_loggers(trainer)
        self._report(trainer, plan)

    def _inform_loggers(self, trainer: TrainerView) -> None:
        for logger in trainer.loggers:
            if type(logger).after_save_checkpoint is Logger.after_save_checkpoint:
                continue
            try:
                logger.after_save_checkpoint(self)
            except Exception as error:
                trainer.note(f"{type(logger).__name__} failed after a checkpoint ({type(error).__name__}: {error}).")

    def _report(self, trainer: TrainerView, plan: SavePlan) -> None:
        if not self.verbose:
            return
        score = f", {self.monitor} = {plan.score:.6g}" if plan.score is not None else ""
        what = f"saved {os.path.basename(plan.path)}" if plan.path else f"not among the best {self.save_top_k}"
        trainer.note(f"Epoch {trainer.current_epoch}, step {trainer.global_step}{score}: {what}.")

    # ---- deletions --------------------------------------------------------------------------------------------------

    def _prune(self, paths: set[str], deletion: BackgroundDeletion) -> list[str]:
        """Rename them to hidden names and queue them for deletion; return a message for each failure."""
        return self._remove(paths, deletion.add)

    def _forget_missing(self, trainer: TrainerView) -> None:
        """Drop records of checkpoints that no longer exist, and delete replaced checkpoints. Collective."""
        known = {*self._kept.paths, self._newest, self.last_model_path} - {""}
        if not known:
            return
        missing = trainer.world.broadcast_object([path for path in known if not os.path.exists(path)])
        self._has_lost = bool(missing)
        for path in missing:
            self._kept.forget(path)
        self._newest = "" if self._newest in missing else self._newest
        self.last_model_path = "" if self.last_model_path in missing else self.last_model_path
        if trainer.is_global_zero:
            for text in self._remove(set(self._replaced) - self._kept.paths - {self.last_model_path}, delete_hidden):
                trainer.note(text)
        self._replaced = []

    def _remove(self, paths: set[str], delete: Callable[[Path], None]) -> list[str]:
        """Delete checkpoints in ``dirpath``; return a sentence for each that could not be deleted.

        Each is renamed to a hidden name first, so that no reader finds it any more, and then passed to ``delete``.
        """
        notes = []
        for path in sorted(paths):
            if self.dirpath is None or not Path(path).is_relative_to(self.dirpath) or not os.path.lexists(path):
                continue
            try:
                hidden = hide(path)
                if hidden is not None:
                    delete(hidden)
            except OSError as error:
                notes.append(f"An old checkpoint was not deleted: {error}")
        return notes

    # ---- names ------------------------------------------------------------------------------------------------------

    def format_checkpoint_name(
        self,
        metrics: Mapping[str, Any],
        filename: str | None = None,
        ver: int | None = None,
        prefix: str | None = None,
    ) -> str:
        """Return the path for metrics, which include ``epoch`` and ``step``.

        ``ver`` is appended as ``-v<ver>``, and ``prefix`` comes first, with ``CHECKPOINT_JOIN_CHAR`` after it.

        Raises:
            MetricError: the template names a metric that is not given.
        """
        filename = filename or self.filename or DEFAULT_NAME
        template = self._as_template(f"{prefix}{self.CHECKPOINT_JOIN_CHAR}{filename}" if prefix else filename)
        return self._names.path(self.dirpath, metrics, template, ver)

    def _as_template(self, filename: str) -> NameTemplate:
        return NameTemplate(filename, self.auto_insert_metric_name, self.CHECKPOINT_EQUALS_CHAR)

    @property
    def _names(self) -> CheckpointNames:
        # Constructed at each call, as the user may change these public attributes.
        last = self._as_template(self.CHECKPOINT_NAME_LAST)
        versions = (self.STARTING_VERSION, self.enable_version_counter)
        template = self._as_template(self.filename or DEFAULT_NAME)
        return CheckpointNames(template, last, self.CHECKPOINT_JOIN_CHAR, self.FILE_EXTENSION, *versions)


def _as_tensor(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor(value, dtype=torch.float64)
