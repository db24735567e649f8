"""The numbers that ranks sum for each optimizer step, and the objects that they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class NameTable(Protocol):
    """The metric names that this rank has logged for the end of the epoch."""

    mark: int
    """A number below 2**20 that differs for different sets of names."""

    def epoch_names(self) -> list[str]: ...


class NoNames:
    """A table without names."""

    mark = 0

    def epoch_names(self) -> list[str]:
        return []


class Tally(Protocol):
    """Numbers of each rank that are summed over the ranks beside those of the control reduction."""

    def unsent(self) -> Sequence[float]:
        """Return this rank's numbers since the last call, as many on every rank."""
        ...

    def receive(self, totals: Sequence[float]) -> None:
        """Take the sums over the ranks."""
        ...

    def waited(self, seconds: float) -> None:
        """Record how long this rank has waited for a control reduction."""
        ...


class NoTally:
    """A tally without numbers."""

    def unsent(self) -> Sequence[float]:
        return ()

    def receive(self, totals: Sequence[float]) -> None:
        pass

    def waited(self, seconds: float) -> None:
        pass


class ControlVector(NamedTuple):
    """The numbers that ranks sum for each optimizer step, beside those of a ``Tally``. The sums of a number and of its
    square show whether ranks agree.

    For ``n`` numbers, ``n * sum(x*x) == sum(x)**2`` holds exactly if all are equal.
    """

    weight: float
    """Sum of the weights of this rank's micro-batches."""
    batches: float
    """Micro-batches of this rank's window."""
    batches_squared: float
    has_data: float
    """1 where this rank has a micro-batch."""
    has_raised: float
    """1 where this rank has raised a trigger."""
    assures_next: float
    """1 where this rank certainly has the micro-batches of another window of this size."""
    step: float
    step_squared: float
    names: float
    """A hash of the names that were logged for the end of the epoch."""
    names_squared: float
    own_seconds: float
    """Seconds per step that this rank computes without waiting for other ranks; used to detect stragglers."""
    own_seconds_squared: float


NUMBERS = len(ControlVector._fields)
