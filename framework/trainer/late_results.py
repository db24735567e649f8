"""``LateResults``: sends the results of evaluations by other processes to the loggers of the fit."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ..report.evaluations import EVALUATIONS_FILE, new_evaluations

if TYPE_CHECKING:
    from pathlib import Path

    from ..metrics.logger_fanout import LoggerFanout


class LateResults:
    """Reads what ``phalanx eval`` adds to the directory of a run while it trains.

    Args:
        directory: the run's directory.
        loggers: the loggers of the fit.
        step: the number of optimizer steps at which the fit begins.
    """

    def __init__(self, directory: Path, loggers: LoggerFanout, step: int) -> None:
        self._path = directory / EVALUATIONS_FILE
        self._loggers = loggers
        self._step, self._began = step, time.time()

    def pick_up(self) -> None:
        """Send the results that are new, each at the step of its checkpoint. One look at the file if there are none."""
        found, self._loggers.late_position = new_evaluations(self._path, self._loggers.late_position)
        for each in found:
            # Of a step that this fit trains again the weights are others.
            if each.step <= self._step or each.time >= self._began:
                # The values of a step are under its index, which is the number of steps before it.
                self._loggers.log_late(each.values, max(0, each.step - 1))
