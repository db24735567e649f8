"""Records of the checkpoints that ``ModelCheckpoint`` has saved and retains, and the saves that change the records."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..framework.api.callback import Callback
from ..framework.checkpoint.background_deletion import BackgroundDeletion
from ..framework.checkpoint.retention import Retention
from ..framework.checkpoint.save_request import SaveRequest
from ..framework.checkpoint.whole_checkpoint import hide
from ..framework.core.errors import PhalanxError
from ..framework.metrics.hparams_text import as_yaml
from ..framework.metrics.logger import Logger
from ..framework.system.atomic_directories import delete_hidden
from .checkpoint_plan import SavePlan

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView


class CheckpointRecords(Callback):
    """The paths and scores of the retained checkpoints, for the user and for a resumed run."""

    monitor: str | None
    mode: str
    save_top_k: int
    save_weights_only: bool
    asynchronous: bool
    verbose: bool
    dirpath: str | None
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
    _superseded: list[str]
    """Checkpoints that are deleted once the pending save is published. A run resumed from that save deletes those that
    a killed run has left."""

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
            "giving_way": list(self._superseded),
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

        moved = {**state, "best_k_models": {here(path): score for path, score in state["best_k_models"].items()}}
        for name in ("newest_models", "kept_for_ever", "giving_way"):
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
        self._superseded = []
        self._has_run = self._deferred = False

    def _restore(self, state: dict[str, Any]) -> None:
        """Restore the records from a state dict: of a checkpoint, or of the moment before a failed save."""
        self._kept.load_state_dict(state)
        self._newest, self.last_model_path = state["newest"], state["last_model_path"]
        self._current = state["current_score"]
        self._superseded = list(state.get("giving_way", []))
        self._deferred = bool(state.get("deferred", False))

    # ---- saves ------------------------------------------------------------------------------------------------------

    def _save(self, trainer: TrainerView, plan: SavePlan) -> None:
        """Save according to a plan; the records are updated first, as they are part of the checkpoint. Collective."""
        before, previous, targets = self.state_dict(), {*self._kept.paths, self.last_model_path}, plan.targets
        self._record(plan)
        if not targets:
            self._report(trainer, plan)
            return
        # A checkpoint that the user resumes from by name stays: it may be the start of several runs.
        spared = {"", *targets, *self._kept.paths, self.last_model_path, trainer.named_checkpoint}
        self._superseded = sorted(previous - spared)
        self._saved_step = trainer.global_step
        request = SaveRequest(
            Path(targets[0]),
            self.save_weights_only,
            self.asynchronous,
            also=Path(targets[1]) if len(targets) > 1 else None,
            failure_key=self.state_key,
            prune=partial(self._prune, set(self._superseded)),
            on_done=partial(self._finished, trainer, plan, before),
        )
        trainer.request_save(request)

    def _record(self, plan: SavePlan) -> None:
        """Add a checkpoint to the records before it is saved."""
        if plan.score is not None:
            self._current = plan.score
        if plan.last:
            self.last_model_path = plan.last
        if plan.counts:
            self._kept.count()
        if plan.path:
            self._newest = plan.path
            self._kept.add(plan.path, plan.score)

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
        for path in missing:
            self._kept.forget(path)
        self._newest = "" if self._newest in missing else self._newest
        self.last_model_path = "" if self.last_model_path in missing else self.last_model_path
        if trainer.is_global_zero:
            for text in self._remove(set(self._superseded) - self._kept.paths - {self.last_model_path}, delete_hidden):
                trainer.note(text)
        self._superseded = []

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


def _as_tensor(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor(value, dtype=torch.float64)
