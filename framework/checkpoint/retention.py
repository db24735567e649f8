"""The checkpoints that a run keeps, and their names.

The best k by a score, the newest n, and every nth permanently are kept. Names are made from a template such as
``"{epoch}-{step}-{val_loss:.2f}"``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from ..core.errors import ConfigurationError, is_count
from ..metrics.monitor import is_better, missing_metric


class BestK:
    """The paths of the best ``k`` checkpoints with their scores; -1 retains all. A score of NaN is never among the
    best.

    Bookkeeping only: the same on every rank, without access to the disk.
    """

    def __init__(self, k: int, mode: str) -> None:
        self.k = k
        self.mode = mode
        self.scores: dict[str, float] = {}

    @property
    def best(self) -> str:
        """The best path; empty while there is none."""
        return self._extreme(self.mode)

    @property
    def worst(self) -> str:
        """The path that a better checkpoint would replace; empty if fewer than ``k`` are retained."""
        full = 0 < self.k <= len(self.scores)
        return self._extreme("max" if self.mode == "min" else "min") if full else ""

    @property
    def kth(self) -> str:
        """The worst path once ``k`` are retained, of all if ``k`` is -1; else empty."""
        return self._extreme("max" if self.mode == "min" else "min") if self.k == -1 else self.worst

    def accepts(self, score: float) -> bool:
        """Whether a checkpoint with this score should be retained."""
        if self.k == -1:
            return True
        if self.k == 0 or math.isnan(score):
            return False
        if len(self.scores) < self.k:
            return True
        # A resumed run has more if it retained more before.
        return is_better(score, sorted(self.scores.values(), reverse=self.mode == "max")[self.k - 1], self.mode)

    def add(self, path: str, score: float) -> None:
        """Add an accepted checkpoint; remove the worst ones beyond ``k``."""
        while path not in self.scores and self.worst:
            del self.scores[self.worst]
        self.scores[path] = score

    def _extreme(self, mode: str) -> str:
        found = ""
        for path, score in self.scores.items():
            if not math.isnan(score) and (not found or is_better(score, self.scores[found], mode)):
                found = path
        return found


class Retention:
    """The retained checkpoints, by path, in the order saved.

    Bookkeeping only, like ``BestK``. ``ranked``: whether scores are used; if not, the newest checkpoint is the best.

    Raises:
        ConfigurationError: a number breaks its rule, or ``k`` needs scores.
    """

    def __init__(self, k: int, mode: str, ranked: bool, newest: int = 0, every_nth: int = 0) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or k < -1:
            raise ConfigurationError(f"ModelCheckpoint(save_top_k={k!r}): give a number, 0 for none, -1 for all.")
        if not ranked and k not in (-1, 0, 1):
            raise ConfigurationError(
                f"ModelCheckpoint(save_top_k={k}) without monitor: name the metric that ranks, or keep the newest with "
                f"keep_last={k}."
            )
        for name, count in (("keep_last", newest), ("keep_every_nth", every_nth)):
            if not is_count(count, 0):
                raise ConfigurationError(f"ModelCheckpoint({name}={count!r}): give a number, 0 for none.")
        self.best = BestK(k, mode)
        self.ranked = ranked
        self.every_nth = every_nth
        self.depth = max(newest, 0 if ranked else k, 1 if not ranked and k == -1 else 0)
        self.waiting: dict[str, tuple[int, float]]
        """Checkpoints that are retained until their score is known: the step and the time of each, in seconds."""
        self.newest: list[str]
        self.forever: list[str]
        self.due: int
        """The number of checkpoints that have been due, written or not."""
        self.clear()

    def clear(self) -> None:
        """Forget all checkpoints."""
        self.best.scores = {}
        self.waiting = {}
        self.newest, self.forever, self.due = [], [], 0

    @property
    def saves(self) -> bool:
        """Whether any checkpoint may be retained."""
        return bool(self.best.k or self.depth or self.every_nth)

    @property
    def paths(self) -> set[str]:
        """The paths of all retained checkpoints."""
        return {*self.best.scores, *self.waiting, *self.newest, *self.forever}

    @property
    def gives_way(self) -> str:
        """The checkpoint that the next one may replace under the same name; empty if there is none."""
        leaving = self.best.worst if self.ranked else self._oldest
        return "" if leaving in {*self.forever, *(self.newest[1:] if self.ranked else ())} else leaving

    @property
    def _oldest(self) -> str:
        full = self.best.k != -1 and 0 < self.depth <= len(self.newest)
        return self.newest[0] if full else ""

    def accepts(self, score: float | None) -> bool:
        """Whether a checkpoint that is due now, with this score, should be written."""
        return self._ranks(score) or self.depth > 0 or self._is_nth(self.due + 1)

    def count(self) -> None:
        """Record that a checkpoint was due."""
        self.due += 1

    def add(self, path: str, score: float | None) -> None:
        """Add an accepted checkpoint, after ``count``."""
        if self.ranked and score is not None and self._ranks(score):
            self.best.add(path, score)
        if self.depth:
            self.newest = [*(one for one in self.newest if one != path), path][-self.depth :]
        if self._is_nth(self.due) or (not self.ranked and self.best.k == -1):
            self.forever = [*(one for one in self.forever if one != path), path]

    def wait(self, path: str, step: int, seconds: float) -> None:
        """Retain an added checkpoint until ``rank`` gives its score."""
        self.waiting[path] = (step, seconds)

    def rank(self, path: str, score: float) -> None:
        """Give the score of a checkpoint that waits for it."""
        del self.waiting[path]
        if self._ranks(score):
            self.best.add(path, score)

    def forget(self, path: str) -> None:
        """Remove a checkpoint that no longer exists."""
        self.best.scores.pop(path, None)
        self.waiting.pop(path, None)
        self.newest = [one for one in self.newest if one != path]
        self.forever = [one for one in self.forever if one != path]

    def state_dict(self) -> dict[str, Any]:
        """Return the retained paths and their scores."""
        return {
            "best_k_models": dict(self.best.scores),
            "waiting_models": {path: list(since) for path, since in self.waiting.items()},
            "newest_models": list(self.newest),
            "kept_for_ever": list(self.forever),
            "due": self.due,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a ``state_dict``; entries missing from an older checkpoint are empty."""
        self.best.scores = {path: float(score) for path, score in state["best_k_models"].items()}
        waiting = state.get("waiting_models", {})
        self.waiting = {path: (int(step), float(seconds)) for path, (step, seconds) in waiting.items()}
        newest = state.get("newest_models", [state["newest"]] if state.get("newest") else [])
        self.newest = list(newest)
        self.forever = list(state.get("kept_for_ever", []))
        self.due = state.get("due", 0)

    def _ranks(self, score: float | None) -> bool:
        return self.best.accepts(score) if self.ranked and score is not None else False

    def _is_nth(self, number: int) -> bool:
        return self.every_nth > 0 and number % self.every_nth == 0


# ---- names ----------------------------------------------------------------------------------------------------------


COUNTERS = ("epoch", "step")


class NameTemplate:
    """A template whose fields are ``epoch``, ``step`` and metrics.

    With ``insert_names`` each value is preceded by its name: ``epoch=3-step=1200-val_loss=0.12``, with another
    text than ``=`` in ``equals``. A slash in such a name becomes an underscore.

    Raises:
        ConfigurationError: the template cannot be read, a field's format does not fit numbers, or there is a slash
            outside fields, which would put checkpoints into folders that are never searched.
    """

    def __init__(self, template: str, insert_names: bool = True, equals: str = "=") -> None:
        self._insert_names = insert_names
        self._equals = equals
        try:
            self._parts = [
                (text, field, spec or "", conversion) for text, field, spec, conversion in Formatter().parse(template)
            ]
            for _, field, spec, _ in self._parts:
                format(1 if field in COUNTERS else 1.0, spec)
        except ValueError as error:
            raise ConfigurationError(f"filename={template!r} cannot be read: {error}.") from error
        if any(field == "" or conversion for _, field, _, conversion in self._parts):
            raise ConfigurationError(
                f"filename={template!r}: write a metric's name in each field, such as {{val_loss:.2f}}."
            )

        if any("/" in text for text, _, _, _ in self._parts):
            raise ConfigurationError(
                f"filename={template!r} must not contain a folder: pass it as dirpath=, where a resumed run looks."
            )

    @property
    def metrics(self) -> list[str]:
        """The metrics that the template uses."""
        return [field for _, field, _, _ in self._parts if field is not None and field not in COUNTERS]

    @property
    def pattern(self) -> str:
        """A regular expression that matches the names of this template, without a suffix."""
        text = ""
        for literal, field, _, _ in self._parts:
            text += re.escape(literal)
            if field is not None:
                text += (re.escape(self._label(field)) if self._insert_names else "") + ".+"
        return text

    def fill(self, epoch: int, step: int, metrics: Mapping[str, float]) -> str:
        """Return the name, without a suffix.

        Raises:
            MetricError: a field names a metric that was not logged.
        """
        counters = {"epoch": epoch, "step": step}
        name = ""
        for text, field, spec, _ in self._parts:
            name += text
            if field is None:
                continue
            if field not in counters and field not in metrics:
                raise missing_metric("A checkpoint's filename", field, metrics)
            value = counters[field] if field in counters else float(metrics[field])
            name += (self._label(field) if self._insert_names else "") + format(value, spec)
        return name

    def _label(self, field: str) -> str:
        return field.replace("/", "_") + self._equals


@dataclass(frozen=True)
class CheckpointNames:
    """The paths of a run's checkpoints: names from a template, and a name for the last one; ``-v1`` is added if a name
    is taken."""

    template: NameTemplate
    last: NameTemplate
    join: str
    extension: str
    first_version: int
    counts_versions: bool

    def path(
        self, directory: str | None, metrics: Mapping[str, Any], template: NameTemplate, version: int | None = None
    ) -> str:
        """Return the path for metrics, which must include ``epoch`` and ``step``.

        Raises:
            MetricError: the template uses a metric that was not logged.
        """
        counters = [int(metrics.get(name, 0)) for name in COUNTERS]
        name = template.fill(counters[0], counters[1], {key: float(value) for key, value in metrics.items()})
        if version is not None:
            name += f"{self.join}v{version}"
        return os.path.join(directory or "", name + self.extension)

    def free(
        self, directory: str | None, metrics: Mapping[str, Any], gives_way: str, template: NameTemplate | None = None
    ) -> str:
        """Return an unused path, or the path of the checkpoint that may be replaced."""
        template = template or self.template
        path = self.path(directory, metrics, template)
        version = self.first_version
        while self.counts_versions and os.path.lexists(path) and path != gives_way:
            path = self.path(directory, metrics, template, version)
            version += 1
        return path

    def gives(self, name: str) -> bool:
        """Whether ``name`` can be the name of one of this run's checkpoints."""
        versions = rf"(?:{re.escape(self.join)}v\d+)?{re.escape(self.extension)}"
        return any(re.fullmatch(f"(?:{one.pattern}){versions}", name) for one in (self.template, self.last))
