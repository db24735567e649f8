"""One piece of work on a thread of its own, that the thread which began it hears of later."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Runs ``work`` at once on a daemon thread. It never raises there: what it met is in ``error`` once it is over.

    ``over`` is called on that thread at the very end.
    """

    def __init__(self, work: Callable[[], None], over: Callable[[], None] = lambda: None) -> None:
        self.error: BaseException | None = None
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work, over), daemon=True, name="phalanx-save")
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until it is over, at most so long; return whether it is."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Ask the work to end soon; nobody waits for it any more."""
        self._given_up.set()

    @property
    def given_up(self) -> bool:
        """Whether the work is no longer wanted."""
        return self._given_up.is_set()

    def _run(self, work: Callable[[], None], over: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            over()
