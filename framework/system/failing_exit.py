"""Actions before a process exits with an error, registered by modules that the exit hooks must not import."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

_actions: list[Callable[[], None]] = []


def before_failing_exit(action: Callable[[], None]) -> None:
    """Call ``action`` before the exit functions of a rank that ends with an error; once, however often registered."""
    if action not in _actions:
        _actions.append(action)


def prepare_failing_exit() -> None:
    """Call all registered actions. Their errors are ignored: they must not replace the error that ends the process."""
    for action in _actions:
        with contextlib.suppress(Exception):
            action()
