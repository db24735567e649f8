"""Contiguous, balanced partitions of counted items."""

from __future__ import annotations


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
