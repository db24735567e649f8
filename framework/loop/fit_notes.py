"""Notes of a fit that come once, as early as possible: metrics that nothing logs, and epochs without an update."""

from __future__ import annotations

import math
from collections.abc import Iterable

from ..metrics.monitor import misspelled_metric
from ..run.run import Run
from .fit_plan import FitPlan


class FitNotes:
    """Reports what a fit lacks.

    Args:
        run: the fit.
        plan: its limits, and whether it validates.
    """

    def __init__(self, run: Run, plan: FitPlan) -> None:
        self._run = run
        self._plan = plan
        self._is_first_step = run.progress.global_batch == 0
        self._validated_names: set[str] | None = None
        self._told: set[str] = set()

    def _needed(self) -> list[tuple[str, str]]:
        """Return the metrics without which the fit fails: by whom, and their names."""
        run = self._run
        needed = [
            (type(each).__name__, name)
            for each in run.callbacks
            for name in each.needed_metrics
            if getattr(each, "strict", True)
        ]
        return needed + [
            (type(each.scheduler).__name__, str(each.monitor))
            for each in run.schedulers
            if each.needs_metric and each.strict
        ]

    def after_sanity_check(self, logged: Iterable[str]) -> None:
        """Report needed metrics whose names differ a little from ``logged`` ones, those of the sanity check."""
        self._validated_names = set(logged)
        for who, name in self._needed():
            if note := misspelled_metric(who, name, self._validated_names):
                self._tell(name, note)

    def after_first_step(self) -> None:
        """Report needed metrics that nothing has logged so far, where a validation would have logged its own."""
        names, is_first = self._validated_names, self._is_first_step
        self._is_first_step = False
        if not is_first or (self._plan.validation is not None and names is None):
            return
        known = {name for each in self._run.train_log for name in (each.plain_name, each.step_name, each.epoch_name)}
        known |= names or set()
        where = "the first optimizer step has not logged it, and this fit does not validate"
        if names is not None:
            where = "neither the sanity check of the validation nor the first optimizer step has logged it"
        for who, name in self._needed():
            if name not in known:
                self._tell(
                    name,
                    f"{who} needs the metric {name!r}: {where}. Unless a hook at the end of an epoch logs it, the fit "
                    "ends with an error where it is needed.",
                )

    def after_epoch(self, steps: int) -> None:
        """Report an epoch of ``steps`` optimizer steps, if there are none and nothing else would say so."""
        run, plan = self._run, self._plan
        if steps:
            return
        epoch = run.progress.epoch
        if not run.module.automatic_optimization and run.optimizers:
            self._tell(
                "manual",
                f"Epoch {epoch} made no optimizer step: with automatic_optimization = False, call "
                "manual_backward(loss) and step() of self.optimizers() in training_step.",
            )
        elif plan.epoch_limit == math.inf and plan.step_limit < math.inf:
            self._tell(
                "end",
                f"epoch {epoch} made no optimizer step, and only max_steps={plan.max_steps} ends this run: where "
                "training_step returns None for every batch, or every update overflows, it never reaches this limit. "
                "Set max_epochs as well.",
            )

    def _tell(self, key: str, text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            self._run.note(text)
