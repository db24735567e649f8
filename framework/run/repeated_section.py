"""``RepeatedSection``: the section of a fit in progress that a run resumed from a checkpoint within it repeats."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ..distributed.seed import capture, restore
from ..metrics.logger_fanout import LoggerFanout
from ..metrics.metric_log import MetricLog


class RepeatedSection:
    """The state of this rank at the start of a section that a resumed run repeats.

    Sections are a validation, and the reduction of an epoch's metrics. A checkpoint that a hook saves within one holds
    the random generators and values of the start of the section: with those of the moment of the save, the repetition
    would draw other random numbers and count values twice.

    A resumed run is in such a section from ``hold_generators`` until the point of the checkpoint, where
    ``restore_generators`` ends it.

    Args:
        log: the values that training has logged in this epoch.
        evaluated: the number of batches that this rank has seen of each validation loader.
        loggers: the loggers, whose position belongs to the state.
    """

    def __init__(self, log: MetricLog, evaluated: dict[int, int], loggers: LoggerFanout) -> None:
        self._log, self._evaluated, self._loggers = log, evaluated, loggers
        self.state: dict[str, Any] | None = None
        """This rank's state at the start of the section; None outside of sections."""
        self.logger_marks: list[tuple[str, dict[str, Any]]] | None = None
        """The position of the loggers at the start of the section; None outside of sections."""

    def begin(self, state: dict[str, Any] | None = None) -> dict[str, Any]:
        """Begin a section with this rank's state: the given one, or that of now. Return the state."""
        self.state = self._captured() if state is None else state
        self.logger_marks = self._loggers.mark()
        return self.state

    def end(self) -> None:
        """End the section, if there is one."""
        self.state = self.logger_marks = None

    @contextmanager
    def entered(self) -> Generator[dict[str, Any], None, None]:
        """Run the body as a section; yield the state at its start."""
        try:
            yield self.begin()
        finally:
            self.end()

    def hold_generators(self, random: dict[str, Any] | None) -> None:
        """Begin the section of a resumed run, and hold the generators of its checkpoint; None for those of now."""
        state = self._captured()
        self.begin(state if random is None else {**state, "random": random})

    def restore_generators(self) -> None:
        """End the section of a resumed run: set the generators as they were at this point of the interrupted run.

        Code that has run since ``hold_generators``, such as hooks, was repeated and may have drawn random numbers. The
        interrupted run has already drawn those, and drawing them again would shift the generators. Only the first call
        has an effect, and none has in a run that was not resumed.
        """
        if self.state is not None:
            restore(self.state["random"])
            self.end()

    def _captured(self) -> dict[str, Any]:
        return {"random": capture(), "log": self._log.record().state_dict(), "evaluated": dict(self._evaluated)}
