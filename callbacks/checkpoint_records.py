"""Records of the checkpoints that ``ModelCheckpoint`` has saved and retains, for the user and for a resumed run."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..framework.api.callback import Callback
from ..framework.checkpoint.retention import Retention
from ..framework.checkpoint.whole_checkpoint import hide
from ..framework.system.atomic_directories import delete_hidden

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView


class CheckpointRecords(Callback):
    """The paths and scores of the retained checkpoints."""

    monitor: str | None
    mode: str
    dirpath: str | None
    last_model_path: str
    """The newest ``last.ckpt``; empty if there is none yet."""
    _kept: Retention
    _newest: str
    _current: float | None
    _giving_way: list[str]
    """Checkpoints replaced by the one being saved, which a resumed run deletes if this run is killed before."""

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
        """The checkpoint that the next better one replaces; empty if fewer than ``save_top_k`` are saved."""
        return self._kept.best.worst

    @property
    def kth_value(self) -> Tensor:
        """The metric that the next checkpoint must exceed to be among the best."""
        room = math.inf if self.mode == "min" else -math.inf
        return torch.tensor(self._kept.best.scores.get(self._kept.best.worst, room), dtype=torch.float64)

    @property
    def current_score(self) -> Tensor | None:
        """The metric of the newest checkpoint; None before the first, or without ``monitor``."""
        return _as_tensor(self._current)

    def state_dict(self) -> dict[str, Any]:
        return {
            "dirpath": self.dirpath,
            **self._kept.state_dict(),
            "newest": self._newest,
            "last_model_path": self.last_model_path,
            "monitor": self.monitor,
            "current_score": self._current,
            "giving_way": list(self._giving_way),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
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

    def _restore(self, state: dict[str, Any]) -> None:
        """Restore the records from a checkpoint."""
        self._kept.load_state_dict(state)
        self._newest, self.last_model_path = state["newest"], state["last_model_path"]
        self._current = state["current_score"]
        self._giving_way = list(state.get("giving_way", []))

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
            for text in self._remove(set(self._giving_way) - self._kept.paths - {self.last_model_path}, delete_hidden):
                trainer.note(text)
        self._giving_way = []

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
