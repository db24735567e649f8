"""``Reporting``: the callbacks and loggers of a Fabric, and the threads that write to the loggers."""

from __future__ import annotations

import atexit
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..core.registry import CALLBACKS, LOGGERS, Registry, as_list
from ..metrics.logger import Logger
from ..metrics.logger_fanout import LoggerFanout
from ..parallel.resources import Resources


class Reporting:
    """Callbacks and loggers of a user's own loop.

    Attributes:
        callbacks: Objects with hooks of any name.
        loggers: The loggers that metrics are sent to.
        updates: Returns the number of updates so far, the default step of metrics.
    """

    def __init__(self, resources: Resources, callbacks: Any, loggers: Any, updates: Callable[[], int]) -> None:
        self.callbacks: list[Any] = _resolved(callbacks, CALLBACKS)
        self.loggers: list[Logger] = _resolved(loggers, LOGGERS)
        self.updates = updates
        self._resources = resources
        self._at_exit: Callable[[], None] | None = None
        self._fanout: LoggerFanout | None = None
        self._written_to: list[Logger] = []

    def log_dict(self, metrics: Mapping[str, Any], step: int | None) -> None:
        """Send metrics to all loggers, from rank 0; see ``Fabric.log_dict``."""
        if self._resources.place.rank != 0 or not self.loggers:
            return
        if step is None:
            step = self.updates()
        numbers = {name: value.item() if isinstance(value, Tensor) else value for name, value in metrics.items()}
        self._writers().log_metrics(numbers, step)

    def end_training(self) -> None:
        """Close the loggers. Call it after the loop; without it they are flushed when the process exits."""
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
            self._at_exit = None
        if self._resources.place.rank == 0 and self.loggers:
            self._writers().finalize("success")
            self._fanout = None

    def _writers(self) -> LoggerFanout:
        """Return the threads that write; new ones if there are other loggers than before."""
        if self._fanout is None or self._written_to != self.loggers:
            if self._fanout is not None:
                self._fanout.finalize("success")
            self._written_to = list(self.loggers)
            self._fanout = LoggerFanout(self._written_to, _print)
            if self._at_exit is not None:
                atexit.unregister(self._at_exit)
            # Refers to the threads only, so that this Fabric and its modules can be freed before the exit.
            self._at_exit = partial(_flush, self._fanout, os.getpid())
            atexit.register(self._at_exit)
        return self._fanout


def _print(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")


def _flush(fanout: LoggerFanout, process: int) -> None:
    """Flush loggers at the exit of a process; one that was forked from it holds copies of the buffered records."""
    if os.getpid() == process:
        fanout.state_dicts()


def _resolved(given: Any, registry: Registry) -> list[Any]:
    """Return a list of objects for None, a name, an object, or a list of names and objects."""
    return [registry.load(one)() if isinstance(one, str) else one for one in as_list(given)]


def accepted(hook: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that a hook accepts."""
    parameters = inspect.signature(hook).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return arguments
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in arguments.items() if name in names}
