"""``LoggerThread``: the thread in which one logger records what was sent to it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

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

    def mark(self) -> dict[str, Any]:
        """Return a dict that is filled with the logger's state once all earlier calls are made; empty if it is too
        slow."""
        state: dict[str, Any] = {}
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
