"""The ranks as data loaders see them, and contiguous, balanced partitions of counted items.

Ranks that read the same data count as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from .world import Pending, World

T = TypeVar("T")


class DataRanks:
    """Collectives between the shards of the data, where several ranks may hold a copy of the same shard."""

    def __init__(self, world: World) -> None:
        self.rank = world.data_rank
        self.size = world.data_size
        self.is_global_zero = world.is_global_zero
        self._world = world
        self._copies = world.size // world.data_size

    def control_reduce(self, numbers: Sequence[float]) -> Pending:
        """Start to sum numbers over all ranks; each shard counts once per copy. Collective."""
        return self._world.control_reduce(numbers)

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Return the object of shard ``src``. Collective."""
        return self._world.broadcast_object(obj, src * self._copies)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return the objects of all shards. Collective."""
        return self._world.all_gather_object(obj)[:: self._copies]


def ceil_div(count: int, by: int) -> int:
    """Return ``count / by`` rounded up."""
    return -(-count // by)


def part_of(count: int, rank: int, size: int) -> tuple[int, int]:
    """Return ``(begin, end)`` of a rank's contiguous part of ``count`` items.

    The parts of all ``size`` ranks differ by at most one item; a part may be empty.
    """
    even, rest = divmod(count, size)
    begin = rank * even + min(rank, rest)
    return begin, begin + even + (rank < rest)
