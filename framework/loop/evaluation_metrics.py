"""Step values of an evaluation, on their way to the loggers."""

from __future__ import annotations

from typing import Any

from ..metrics.metric_log import MetricLog
from ..run.run import Run
from ..run.run_metrics import as_numbers

# Number of batches whose step values wait on the device before they are read for the loggers: each read synchronizes.
_STEPS_WAITING = 256


class StepMetrics:
    """Values logged with ``on_step=True`` in an evaluation, for the loggers, indexed by the number of batches seen.

    Values are read in groups, since reading a value from a device waits for the device.
    """

    def __init__(self, run: Run, seen: dict[int, int], log: MetricLog, loader: int) -> None:
        self._log = log
        self._run = run
        strategy = run.strategy
        self._part = strategy.part
        self._seen = seen
        self._loader = loader
        self._waiting: list[tuple[int, dict[str, Any]]] = []

    def begin(self, batch: Any) -> None:
        """Weight the values that the step logs by this batch."""
        self._log.begin_batch(batch, self._part.share)
        self._log.fed.add(self._log.loader)

    def record(self) -> None:
        """Record the step values of a batch."""
        seen = self._seen[self._loader] = self._seen.get(self._loader, 0) + 1
        if (values := self._log.step_values("logger")) and not self._run.sanity_checking:
            self._waiting.append((seen, values))
            if len(self._waiting) >= _STEPS_WAITING:
                self.flush()

    def flush(self) -> None:
        """Send the recorded values to the loggers."""
        for step, values in self._waiting:
            self._run.loggers.log_metrics({**as_numbers(values), "epoch": self._run.progress.epoch}, step)
        self._waiting = []
