"""``LoggerFanout``: passes metrics to every logger, in threads, so that no logger can stop or slow down training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from .logger import Logger
from .logger_thread import LoggerThread

# After this time the end of a run reports that it waits for a logger; Logger.close_seconds limits the waiting.
_PATIENCE_SECONDS = 1.0
# How long a checkpoint waits, once, for a logger to write the records made before it.
_FLUSH_SECONDS = 2.0


class LoggerFanout:
    """Passes metrics to several loggers.

    Each logger runs in a separate thread, which starts with the first metric and ends with ``finalize``. The training
    thread only appends to a queue (below a microsecond). Any logger may block on a network or a stuck disk; in the
    training thread such a call could not be timed out, and all ranks would wait for it. With threads, the cost of a
    step does not depend on the loggers, and training does not wait for the import of a heavy one.

    A call that raises is lost, and the first one of each method is reported. A logger whose method has raised three
    times in a row is reported and no longer called; the others continue. Reports are made in the thread that calls
    these methods.

    Args:
        loggers: the destinations, in order.
        note: called with one sentence to print on the console.
    """

    def __init__(self, loggers: Sequence[Logger], note: Callable[[str], None]) -> None:
        self._note = note
        self._writers = [LoggerThread(logger) for logger in loggers]
        self._observers: list[Callable[[Mapping[str, float], int], None]] = []

    @property
    def loggers(self) -> list[Logger]:
        """The loggers that have not failed."""
        return [writer.logger for writer in self._writers]

    def observe(self, function: Callable[[Mapping[str, float], int], None]) -> None:
        """Pass metrics to a function, too, which may keep them.

        It runs in the training thread, so it must be quick and never block.
        """
        self._observers.append(function)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics, which must be plain numbers here, at an optimizer step."""
        metrics = dict(metrics)
        for observe in self._observers:
            observe(metrics, step)
        for writer in self._writers:
            writer.newest_step = step
        self._send("log_metrics", metrics, step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._send("log_hyperparams", dict(params))

    @property
    def records_graph(self) -> bool:
        """Whether any logger records the model's graph."""
        return any(writer.logger.records_graph for writer in self._writers)

    def log_graph(self, model: nn.Module) -> None:
        """Record the model's graph; in the calling thread, since it may run the model."""
        for writer in self._writers:
            if writer.logger.records_graph:
                writer.call("log_graph", partial(writer.logger.log_graph, model))
        self._leave_out_failed()

    def save(self) -> None:
        """Ask every logger to flush its buffered records soon."""
        self._send("save")

    def state_dicts(self, marks: list[tuple[str, dict[str, Any]]] | None = None) -> list[dict[str, Any]]:
        """Flush all loggers and return the state of each, now or at ``marks``, for a checkpoint.

        A logger that takes too long is not waited for again; its state is unknown from that time.
        """
        marks = self.mark() if marks is None else marks
        for writer in self._writers:
            writer.flush(_FLUSH_SECONDS)
        self._leave_out_failed()
        return [{"kind": name, "state": dict(state)} for name, state in marks]

    def mark(self) -> list[tuple[str, dict[str, Any]]]:
        """Return, for a later ``state_dicts``, the state of each logger after all calls made so far."""
        return [(writer.name, writer.mark()) for writer in self._writers]

    def resume(self, step: int, states: Sequence[Mapping[str, Any]]) -> None:
        """Drop records that loggers made after a checkpoint that was saved with ``states`` (see ``state_dicts``)."""
        same = [writer.name for writer in self._writers] == [state["kind"] for state in states]
        for number, writer in enumerate(self._writers):
            state = states[number]["state"] if same else {}
            writer.call("resume", partial(writer.logger.resume, step, state))
        self._leave_out_failed()

    def finalize(self, status: str) -> None:
        """Flush and finalize every logger and end the threads; later calls start them again."""
        self._send("finalize", status)
        for writer in self._writers:
            writer.finish()
        began = time.monotonic()
        self._wait_until(began + _PATIENCE_SECONDS)
        busy = [writer for writer in self._writers if writer.is_busy()]
        if busy:
            names = ", ".join(writer.name for writer in busy)
            limit = max(writer.logger.close_seconds for writer in busy)
            self._note(f"Waiting for {names} to finish writing, at most {limit:.0f} s.")
            for writer in busy:
                writer.join(max(0.0, began + writer.logger.close_seconds - time.monotonic()))
        self._report_lost()
        self._leave_out_failed()

    def _send(self, method: str, *arguments: Any) -> None:
        has_news = False
        for writer in self._writers:
            writer.put(method, arguments)
            if writer.reports or writer.error is not None:
                has_news = True
        if has_news:
            self._leave_out_failed()

    def _wait_until(self, deadline: float) -> None:
        for writer in self._writers:
            writer.join(max(0.0, deadline - time.monotonic()))

    def _report_lost(self) -> None:
        for writer in self._writers:
            if writer.is_busy() and writer.error is None:
                writer.give_up()
            if lost := writer.take_lost():
                self._note(f"{writer.name} was too slow: {lost} calls were dropped.")

    def _leave_out_failed(self) -> None:
        for writer in self._writers:
            while writer.reports:
                self._note(writer.reports.pop(0))
        failed = [writer for writer in self._writers if writer.error is not None]
        self._writers = [writer for writer in self._writers if writer.error is None]
        for writer in failed:
            self._note(
                f"{writer.name} failed ({type(writer.error).__name__}: {writer.error}): "
                "it is no longer used; training and the other loggers continue."
            )
