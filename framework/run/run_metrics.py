"""``RunMetrics``: the logged values of a run, for callbacks, loggers, the progress bar and schedulers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..metrics.monitor import missing_metric

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..core.progress import Progress
    from ..metrics.logger_fanout import LoggerFanout
    from ..metrics.metric_entry import Entry
    from ..metrics.metric_log import MetricLog

# For each reader, the flag of the log entries that it receives.
_FLAGS = {"progress_bar": "prog_bar", "logged": "logger"}


class RunMetrics:
    """The logged values of a run by reader: ``"callback"``, ``"logged"`` and ``"progress_bar"``."""

    def __init__(self, train_log: MetricLog, loggers: LoggerFanout) -> None:
        self.train_log = train_log
        self.loggers = loggers
        self.logs: list[MetricLog] = [train_log]
        """The logs in use: that of training, and that of an evaluation in progress."""
        self.values: dict[str, dict[str, Any]] = {"callback": {}, "logged": {}, "progress_bar": {}}
        self.measured: dict[str, int] = {}
        """For each metric of a validation, ``Progress.global_batch`` when it was measured."""

    def include(self, log: MetricLog) -> None:
        """Include the values of this log while it is in use."""
        self.logs.append(log)

    def exclude(self, log: MetricLog) -> None:
        """Stop showing the values of this log."""
        self.logs.remove(log)

    def publish_step(self, progress: Progress) -> None:
        """Send the newest step values to the loggers."""
        progress.published = progress.global_step
        values = self.train_log.step_values("logger")
        if values:
            self.send(as_numbers(values), progress)

    def publish_epoch(
        self, log: MetricLog, progress: Progress, hooks: Sequence[Callable[..., Any]], silent: bool
    ) -> dict[Entry, float]:
        """Reduce an epoch's values over ranks, call hooks, reduce the values that the hooks logged. Collective.

        The hooks see the values of the steps, as in Lightning; a second reduction follows only if there are hooks.
        With ``silent`` no values are sent to the loggers.
        """
        self.values["callback"].update(log.current())
        for reader, flag in _FLAGS.items():
            self.values[reader].update(log.step_values(flag))
        reduced, more = log.reduce(more=bool(hooks))
        self._keep(reduced, log, progress)
        if more:
            for hook in hooks:
                hook()
            later, _ = log.reduce()
            self._keep(later, log, progress)
            reduced |= later
        log.finish()
        logged = {entry.epoch_name: value.item() for entry, value in reduced.items() if entry.logger}
        if logged and not silent:
            self.send(logged, progress)
        return {entry: value.item() for entry, value in reduced.items()}

    def send(self, numbers: Mapping[str, float], progress: Progress) -> None:
        """Send numbers and the epoch to the loggers, at the index of the newest optimizer step."""
        step = max(0, progress.global_step - 1)
        self.loggers.log_metrics({**numbers, "epoch": progress.epoch}, step)

    def _keep(self, reduced: Mapping[Entry, Tensor], log: MetricLog, progress: Progress) -> None:
        for entry, value in reduced.items():
            name = entry.epoch_name
            for known in (name, entry.plain_name):
                if log.stage == "validate":
                    self.measured[known] = progress.global_batch
                else:
                    self.measured.pop(known, None)
            self.values["callback"][name] = value
            self.values["callback"][entry.plain_name] = value
            if entry.prog_bar:
                self.values["progress_bar"][name] = value
            if entry.logger:
                self.values["logged"][name] = value

    def view(self, reader: str) -> dict[str, Tensor]:
        """Return the values for a reader as 0-d tensors."""
        values = dict(self.values[reader])
        for log in self.logs:
            values.update(log.current() if reader == "callback" else log.step_values(_FLAGS[reader]))
        return {name: torch.as_tensor(value) for name, value in values.items()}

    def epoch_numbers(self, began: int) -> dict[str, float]:
        """Return the values for the loggers and the progress bar at the end of an epoch: of training, then validation.

        Values of validations before the epoch, whose first micro-batch is number ``began`` of the fit, are left out.
        Those that are on a device are read at once.
        """
        values = {**self.view("progress_bar"), **self.view("logged")}
        current = {name: value for name, value in values.items() if self.measured.get(name, math.inf) > began}
        return as_numbers(dict(sorted(current.items(), key=lambda item: item[0] in self.measured)))

    def restore_measured(self, measured: Mapping[str, int]) -> None:
        """Restore ``measured`` from a checkpoint."""
        self.measured.update(measured)

    def outdated(self, global_batch: int) -> frozenset[str]:
        """Return the metrics that a validation measured before ``global_batch`` and training has not logged since."""
        current = self.train_log.current()
        return frozenset(name for name, at in self.measured.items() if at != global_batch and name not in current)

    def monitored(self, name: str, who: str) -> Tensor:
        """Return a logged value.

        Raises:
            MetricError: no such value was logged; the message lists the logged names.
        """
        known = self.view("callback")
        if name not in known:
            raise missing_metric(who, name, known)
        return known[name]

    def clear(self) -> None:
        """Remove all values, for example those of a sanity check, which are not shown."""
        self.measured.clear()
        for values in self.values.values():
            values.clear()


def as_numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return values as floats; tensors on a device are read with one synchronization per device."""
    if {*map(type, values.values())} == {float}:
        return values
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = (
        dict(zip(tensors, torch.stack([t.double() for t in tensors.values()]).tolist(), strict=True)) if tensors else {}
    )
    return {name: numbers[name] if name in numbers else float(value) for name, value in values.items()}
