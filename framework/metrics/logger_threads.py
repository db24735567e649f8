"""``LoggerFanout``: passes metrics to every logger, in threads, so that no logger can end or slow the training."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from .logger import Logger

if TYPE_CHECKING:
    from torch import nn

# How often a writer looks for new calls, in seconds. Waking a thread for each call costs more than logging.
_PERIOD_SECONDS = 0.25
# Beyond this many waiting calls a logger is so slow that keeping more would only fill the memory.
_CAPACITY = 100_000
# How long the end of a run waits for a logger that hangs, and when it says so.
_FINALIZE_SECONDS = 5.0
_PATIENCE_SECONDS = 1.0
# How long a checkpoint waits, once, for a logger to write what belongs before it.
_FLUSH_SECONDS = 2.0


class LoggerFanout:
    """Passes metrics on to several loggers.

    Each logger is written by a thread of its own, which starts with the first figure and ends with ``finalize``. The
    training thread only appends to a queue (below a microsecond): a logger that waits for a network or a stuck disk
    can be anybody's, its wait would be every rank's, and no limit can be put on a call that is made in the training
    thread. So a step costs the same whatever the loggers do, and the import of a heavy one is not waited for either.

    A logger that raises is reported once and left out from then on; the others go on. Reports are made by the thread
    that calls these methods.

    Args:
        loggers: the destinations, in order.
        note: called with one sentence for the person at the screen.
    """

    def __init__(self, loggers: Sequence[Logger], note: Callable[[str], None]) -> None:
        self._note = note
        self._writers = [_Writer(logger) for logger in loggers]

    @property
    def loggers(self) -> list[Logger]:
        """The loggers that still take part."""
        return [writer.logger for writer in self._writers]

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics, which are plain numbers here, at an optimizer step."""
        self._send("log_metrics", dict(metrics), step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self._send("log_hyperparams", dict(params))

    def log_graph(self, model: nn.Module) -> None:
        """Record the model's graph; in the calling thread, since it may run the model."""
        for writer in self._writers:
            if type(writer.logger).log_graph is not Logger.log_graph:
                writer.call(partial(writer.logger.log_graph, model))
        self._leave_out_failed()

    def save(self) -> None:
        """Have every logger write what it keeps, soon."""
        self._send("save")

    def state_dicts(self, marks: list[tuple[str, dict[str, Any]]] | None = None) -> list[dict[str, Any]]:
        """Have what was logged so far written, and return where each logger stands, or stood, for a checkpoint.

        A logger that takes too long is not waited for again, and its state is unknown from then on.
        """
        marks = self.mark() if marks is None else marks
        for writer in self._writers:
            writer.flush(_FLUSH_SECONDS)
        self._leave_out_failed()
        return [{"kind": name, "state": dict(state)} for name, state in marks]

    def mark(self) -> list[tuple[str, dict[str, Any]]]:
        """Return, for a later ``state_dicts``, where each logger stands once it has come to what was logged so far."""
        return [(writer.name, writer.mark()) for writer in self._writers]

    def resume(self, step: int, states: Sequence[Mapping[str, Any]]) -> None:
        """Have loggers drop what they recorded after a checkpoint, whose ``state_dicts`` these are."""
        same = [writer.name for writer in self._writers] == [state["kind"] for state in states]
        for number, writer in enumerate(self._writers):
            state = states[number]["state"] if same else {}
            writer.call(partial(writer.logger.resume, step, state))
        self._leave_out_failed()

    def finalize(self, status: str) -> None:
        """Write everything, end every logger and the threads; what comes later starts them again."""
        self._send("finalize", status)
        for writer in self._writers:
            writer.finish()
        began = time.monotonic()
        self._wait_until(began + _PATIENCE_SECONDS)
        busy = [writer for writer in self._writers if writer.is_busy()]
        if busy:
            names = ", ".join(writer.name for writer in busy)
            self._note(f"Waiting for {names} to finish writing, at most {_FINALIZE_SECONDS:.0f} s.")
            self._wait_until(began + _FINALIZE_SECONDS)
        self._report_lost()
        self._leave_out_failed()

    def _send(self, method: str, *arguments: Any) -> None:
        failed = False
        for writer in self._writers:
            writer.put(method, *arguments)
            failed = failed or writer.error is not None
        if failed:
            self._leave_out_failed()

    def _wait_until(self, deadline: float) -> None:
        for writer in self._writers:
            writer.join(max(0.0, deadline - time.monotonic()))

    def _report_lost(self) -> None:
        for writer in self._writers:
            if writer.is_busy() and writer.error is None:
                writer.error = TimeoutError(
                    f"it did not finish in {_FINALIZE_SECONDS:.0f} s, and {writer.waiting} calls were left out"
                )
            if writer.lost:
                self._note(f"{writer.name} was too slow: {writer.lost} calls were left out.")
                writer.lost = 0

    def _leave_out_failed(self) -> None:
        failed = [writer for writer in self._writers if writer.error is not None]
        self._writers = [writer for writer in self._writers if writer.error is None]
        for writer in failed:
            self._note(
                f"{writer.name} failed ({type(writer.error).__name__}: {writer.error}): "
                "it is left out from now on; training and the other loggers go on."
            )


class _Writer:
    """One logger, the calls that wait for it, and the thread that makes them."""

    def __init__(self, logger: Logger) -> None:
        self.logger = logger
        self.name = type(logger).__name__
        self.error: BaseException | None = None
        self.lost = 0
        self._calls: deque[Callable[[], Any]] = deque()
        self._finishing = False
        # Set when another thread waits for this one, which otherwise looks only now and then.
        self._wanted = Event()
        self._written: Event | None = None
        self._keeps_up = True
        self._thread: Thread | None = None

    @property
    def waiting(self) -> int:
        """How many calls have not been made yet."""
        return len(self._calls)

    def put(self, method: str, *arguments: Any) -> None:
        if len(self._calls) >= _CAPACITY:
            self.lost += 1
            return
        self._calls.append(partial(getattr(self.logger, method), *arguments))
        if self._thread is None:
            self._start()

    def call(self, function: Callable[[], Any]) -> None:
        """Make a call in this thread."""
        if self.error is None:
            try:
                function()
            except Exception as error:
                self.error = error
                # It is not called again, so whatever it holds open goes now.
                with contextlib.suppress(Exception):
                    self.logger.finalize("failed")

    def mark(self) -> dict[str, Any]:
        """Return a dict that gets the logger's state when it has come this far; empty where it does not keep up."""
        state: dict[str, Any] = {}
        read = partial(_read_state, self.logger, state)
        if self._thread is None:
            self.call(read)
        elif self._keeps_up:
            self._calls.append(read)
        return state

    def flush(self, seconds: float) -> None:
        """Wait until the logger has written all, or that takes too long."""
        if self._thread is None or not self._keeps_up:
            return
        written = self._written = Event()
        self._calls += [self.logger.save, written.set]
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

    def is_busy(self) -> bool:
        return self._thread is not None

    def _start(self) -> None:
        self._finishing = False
        self._wanted.clear()
        # A daemon: one that hangs for ever must not keep the process from ending.
        self._thread = Thread(target=self._run, name=f"phalanx-{self.name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self.error is None:
            self._wanted.wait(_PERIOD_SECONDS)
            self._wanted.clear()
            finishing = self._finishing
            while self._calls and self.error is None:
                self.call(self._calls.popleft())
            if finishing:
                return
        self._calls.clear()
        if (written := self._written) is not None:
            written.set()


def _read_state(logger: Logger, state: dict[str, Any]) -> None:
    state.update(logger.state_dict())
