"""A task on a separate thread, whose error is stored for the thread that started it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs ``work`` at once on a daemon thread. An exception is not raised there but stored in ``error``.

    ``over`` is called on that thread at the end.
    """

    def __init__(self, work: Callable[[], None], over: Callable[[], None] = lambda: None) -> None:
        self.error: BaseException | None = None
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work, over), daemon=True, name="phalanx-save")
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the task has ended, at most ``seconds``; return whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Ask the task to end soon, as its result is no longer awaited."""
        self._given_up.set()

    @property
    def given_up(self) -> bool:
        """Whether ``give_up`` was called."""
        return self._given_up.is_set()

    def _run(self, work: Callable[[], None], over: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            over()
