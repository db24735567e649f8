"""``LoggerFanout``: passes metrics to every logger, in threads, so that no logger can stop or slow down training."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event, Thread
from typing import Any

from torch import nn

from .logger import Logger
from .media import Media

# How often a writer polls for new calls, in seconds. Waking a thread for each call costs more than logging.
_PERIOD_SECONDS = 0.25
# Calls beyond this many in a queue are dropped: the logger is too slow, and the queue would fill the memory.
_CAPACITY = 100_000
# Media items beyond this memory in a queue are dropped for the same reason.
_MEDIA_BYTES = 256 << 20
# After so many failures of a method in a row a logger is no longer called: its disk is full, or its server is gone.
_FAILURES_IN_A_ROW = 3


class LoggerThread:
    """A logger, its queue of calls, and the thread that makes them."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self.name = type(logger).__name__
        self.error: BaseException | None = None
        """The error for which the logger is no longer called."""
        self.reports: list[str] = []
        self.lost = 0
        self._failures: dict[str, int] = {}
        """For each method that has raised, how often in a row."""
        self._calls: deque[tuple[str, Callable[..., Any], tuple[Any, ...]]] = deque()
        self._finishing = False
        # Set when another thread waits for this one, which otherwise polls at intervals.
        self._wanted = Event()
        self._written: Event | None = None
        self._keeps_up = True
        self._thread: Thread | None = None
        self.newest_step = 0
        """The step of the newest metrics that were sent to the logger."""
        # Bytes of media put by the training thread, and those recorded by this thread: each has one writer.
        self._media_put = self._media_recorded = 0
        logger.use_thread(self)

    @property
    def waiting(self) -> int:
        """The number of calls that have not been made yet."""
        return len(self._calls)

    def take_lost(self) -> int:
        """Return the number of calls that were dropped since this was called last."""
        lost, self.lost = self.lost, 0
        return lost

    def give_up(self) -> None:
        """Make no further calls: the logger has not finished in time."""
        self.error = TimeoutError(
            f"it did not finish in {self.logger.close_seconds:.0f} s, and {self.waiting} calls were dropped"
        )

    def put(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Have the thread call a method of the logger."""
        if len(self._calls) >= _CAPACITY:
            self.lost += 1
            return
        self._calls.append((method, getattr(self.logger, method), arguments))
        if self._thread is None:
            self._start()

    def put_media(self, media: Media) -> None:
        """Have the logger record a media item, unless its queue holds too many of them."""
        if self._media_put - self._media_recorded + media.num_bytes > _MEDIA_BYTES:
            self.lost += 1
            return
        self._media_put += media.num_bytes
        self._calls.append(("log_media", self._log_media, (media,)))
        if self._thread is None:
            self._start()

    def _log_media(self, media: Media) -> None:
        self._media_recorded += media.num_bytes
        self.logger.log_media(media)

    def note(self, sentence: str) -> None:
        """Have a sentence printed by the thread that sends calls."""
        self.reports.append(sentence)

    def call(self, method: str, function: Callable[..., Any], arguments: tuple[Any, ...] = ()) -> None:
        """Make a call in this thread."""
        if self.error is not None:
            return
        try:
            function(*arguments)
        except Exception as error:
            self._failed(method, error)
        else:
            if self._failures:
                self._failures.update({method: 0} if method in self._failures else {})

    def _failed(self, method: str, error: Exception) -> None:
        """Report the first failure of a method; give the logger up if the method keeps failing."""
        if method not in self._failures:
            self.reports.append(
                f"{self.name}.{method} failed ({type(error).__name__}: {error}): this call is lost; the logger "
                "remains in use."
            )
        self._failures[method] = self._failures.get(method, 0) + 1
        if self._failures[method] >= _FAILURES_IN_A_ROW:
            self.error = error
            # The logger is not called again, so release it and the resources that it holds.
            with contextlib.suppress(Exception):
                self.logger.finalize("failed")

    def mark(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dict with known values that is filled with the logger's state once all earlier calls are made; it
        is not if the logger is too slow."""
        state = dict(known)
        if self._thread is None:
            self.call("state_dict", _read_state, (self.logger, state))
        elif self._keeps_up:
            self._calls.append(("state_dict", _read_state, (self.logger, state)))
        return state

    def flush(self, seconds: float) -> None:
        """Wait until the logger has made all calls, at most ``seconds``."""
        if self._thread is None or not self._keeps_up:
            return
        written = self._written = Event()
        self._calls += [("save", self.logger.save, ()), ("flush", written.set, ())]
        self._wanted.set()
        self._keeps_up = written.wait(seconds)
        self._written = None

    def finish(self) -> None:
        self._finishing = True
        self._wanted.set()

    def join(self, seconds: float) -> None:
        if self._thread is None:
            return
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._thread = None
            self.logger.use_thread(None)

    def is_busy(self) -> bool:
        return self._thread is not None

    def _start(self) -> None:
        self._finishing = False
        self._wanted.clear()
        self.logger.use_thread(self)
        # A daemon thread: a logger that hangs forever must not keep the process from ending.
        self._thread = Thread(target=self._run, name=f"phalanx-{self.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self.error is None:
            self._wanted.wait(_PERIOD_SECONDS)
            self._wanted.clear()
            finishing = self._finishing
            while self._calls and self.error is None:
                self.call(*self._calls.popleft())
            if finishing:
                return
        self._calls.clear()
        if (written := self._written) is not None:
            written.set()


def _read_state(logger: Logger, state: dict[str, Any]) -> None:
    state.update(logger.state_dict())


# The key of ``late_position`` in the state of a logger.
_POSITION = "late_position"
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
        self._pick_up: Callable[[], None] | None = None
        self.late_position = 0
        """How much of the source of late results has been sent. A checkpoint holds it with the states of the loggers,
        so that a resumed fit sends the rest, once."""

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

    def pick_up_by(self, function: Callable[[], None]) -> None:
        """Call a function whenever a checkpoint is saved and before the loggers are finalized; it sends late results.

        It runs in the training thread.
        """
        self._pick_up = function

    def log_late(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics at an optimizer step before the newest one. Observers, which know them by themselves, and the
        order of steps that they see, are left out."""
        self._send("log_metrics", dict(metrics), step)

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
        self._take_late()
        marks = self.mark() if marks is None else marks
        for writer in self._writers:
            writer.flush(_FLUSH_SECONDS)
        self._leave_out_failed()
        return [{"kind": name, "state": dict(state)} for name, state in marks]

    def mark(self) -> list[tuple[str, dict[str, Any]]]:
        """Return, for a later ``state_dicts``, the state of each logger after all calls made so far."""
        position = {_POSITION: self.late_position} if self.late_position else {}
        return [(writer.name, writer.mark(position)) for writer in self._writers]

    def resume(self, step: int, states: Sequence[Mapping[str, Any]]) -> None:
        """Drop records that loggers made after a checkpoint that was saved with ``states`` (see ``state_dicts``)."""
        same = [writer.name for writer in self._writers] == [state["kind"] for state in states]
        for number, writer in enumerate(self._writers):
            state = dict(states[number]["state"]) if same else {}
            self.late_position = int(state.pop(_POSITION, 0))
            writer.call("resume", partial(writer.logger.resume, step, state))
        self._leave_out_failed()

    def finalize(self, status: str) -> None:
        """Flush and finalize every logger and end the threads; later calls start them again."""
        self._take_late()
        self._send("finalize", status)
        for writer in self._writers:
            writer.finish()
        began = time.monotonic()
        for writer in self._writers:
            writer.join(max(0.0, began + _PATIENCE_SECONDS - time.monotonic()))
        busy = [writer for writer in self._writers if writer.is_busy()]
        if busy:
            names = ", ".join(writer.name for writer in busy)
            limit = max(writer.logger.close_seconds for writer in busy)
            self._note(f"Waiting for {names} to finish writing, at most {limit:.0f} s.")
            for writer in busy:
                writer.join(max(0.0, began + writer.logger.close_seconds - time.monotonic()))
        self._report_lost()
        self._leave_out_failed()

    def _take_late(self) -> None:
        if self._pick_up is not None and self._writers:
            self._pick_up()

    def _send(self, method: str, *arguments: Any) -> None:
        has_news = False
        for writer in self._writers:
            writer.put(method, arguments)
            if writer.reports or writer.error is not None:
                has_news = True
        if has_news:
            self._leave_out_failed()

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
