"""``Attendance``: whether this rank has values for the collectives that the user's code calls."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from ..core.errors import LoopError


class Attendance:
    """The state that ``user_collectives`` reads."""

    def __init__(self) -> None:
        self.varies = False
        """Whether steps of a Trainer run: ranks may have different numbers of batches."""
        self.counts = True
        """Whether the values of this rank count. They do not while it runs a filler batch."""
        self.was_called = False
        """Whether the user's code has called a collective since this was last reset."""
        self._refusal = ""

    @contextmanager
    def refusing(self, reason: str) -> Generator[None, None, None]:
        """Refuse collectives of the user's code within the context; ``reason`` follows the name of the collective."""
        self._refusal = reason
        try:
            yield
        finally:
            self._refusal = ""

    def check(self, name: str) -> None:
        """Raise for a collective that is refused now.

        Raises:
            LoopError: the ranks cannot call it together here.
        """
        if self._refusal:
            raise LoopError(f"{name} {self._refusal}")
