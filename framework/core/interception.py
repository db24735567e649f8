"""``intercepting``: a program is inspected up to where it would train, with other settings than it has given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol


class Interceptor(Protocol):
    """Receives the Trainer's arguments and calls of a program. The types are those of ``framework/trainer``."""

    def settings(self, given: Any) -> Any:
        """Return the ``TrainerSettings`` to use in place of those of the program."""

    def stage(self, session: Any, stage: str, request: Any) -> Any:
        """Return the results of a stage whose ``StageRequest`` has been checked, in place of running it."""

    def loop(self) -> None:
        """Called before ranks are started, or Fabric prepares a module, for a training loop of the program's own."""


# Not a context variable: the threads of a program are intercepted too.
_current: Interceptor | None = None


@contextlib.contextmanager
def intercepting(interceptor: Interceptor) -> Iterator[None]:
    """Let an interceptor receive the settings, stages and loops of this process while the context lasts."""
    global _current
    before, _current = _current, interceptor
    try:
        yield
    finally:
        _current = before


def current_interceptor() -> Interceptor | None:
    """Return the interceptor of this process; None if the program runs as it is."""
    return _current


def intercept_loop() -> None:
    """Let the interceptor end a program that is about to start ranks, or to begin a training loop."""
    if _current is not None:
        _current.loop()
