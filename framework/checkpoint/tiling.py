"""Check that boxes cover a tensor exactly once, in time bounded even for a hostile manifest. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TypeAlias

Box: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"
"""The offsets of a part, and its shape."""

# Parts of meshes can be separated along one dim after another; the groups that remain are small.
_MAX_CUTS = 8
_MAX_PAIRWISE = 64


def is_flat(shape: Sequence[int], offsets: Sequence[int]) -> bool:
    """Whether a part is a range of the flattened (row-major) tensor: it has one offset, and the tensor does not have
    one dim."""
    return len(offsets) == 1 and len(shape) != 1


def coverage_problem(shape: tuple[int, ...], boxes: Iterable[Box]) -> str | None:
    """Return the reason why boxes ``(offsets, shape)`` do not cover a tensor exactly once, or None if they do."""
    boxes = list(boxes)
    kinds = {is_flat(shape, offsets) for offsets, _ in boxes}
    if kinds == {True, False}:
        return "parts by dim and parts of the flattened tensor are mixed"
    if kinds == {True}:
        shape = (prod(shape),)
    for offsets, extent in boxes:
        if not len(offsets) == len(extent) == len(shape):
            return f"a part at {list(offsets)} of shape {list(extent)} does not fit the dims of {list(shape)}"
        if any(start + size > whole for start, size, whole in zip(offsets, extent, shape, strict=True)):
            return f"a part at {list(offsets)} of shape {list(extent)} reaches beyond {list(shape)}"
    covered = sum(prod(extent) for _, extent in boxes)
    if covered != prod(shape):
        return f"the parts hold {covered:,} of {prod(shape):,} elements"
    return _overlap([box for box in boxes if prod(box[1])], _MAX_CUTS)


def _overlap(boxes: list[Box], cuts: int) -> str | None:
    """Find two boxes that share an element: separate the boxes along a dim if possible, and check each group.

    Comparing all pairs would take hours for a hundred thousand parts. If no cut is found, only a few boxes may be left.
    """
    if len(boxes) < 2:
        return None
    for dim in range(len(boxes[0][0]) if cuts else 0):
        heaps = _cut_apart(boxes, dim)
        if len(heaps) > 1:
            return next((problem for heap in heaps if (problem := _overlap(heap, cuts - 1))), None)
    if len(boxes) > _MAX_PAIRWISE:
        return f"the {len(boxes)} parts at {list(boxes[0][0])} and beyond overlap, or interlock without a plane between"
    for index, (offsets, extent) in enumerate(boxes):
        for other, size in boxes[:index]:
            if all(a < b + m and b < a + n for a, n, b, m in zip(offsets, extent, other, size, strict=True)):
                return f"the parts at {list(other)} and {list(offsets)} overlap"
    return None


def _cut_apart(boxes: list[Box], dim: int) -> list[list[Box]]:
    """Group the boxes such that a plane across ``dim`` separates the groups."""
    heaps: list[list[Box]] = []
    end = -1
    for box in sorted(boxes, key=lambda box: box[0][dim]):
        start, size = box[0][dim], box[1][dim]
        if start >= end:
            heaps.append([])
        heaps[-1].append(box)
        end = max(end, start + size)
    return heaps


def flat_boxes(shape: tuple[int, ...], start: int, length: int) -> Iterator[Box]:
    """Yield boxes that cover ``length`` elements, beginning at ``start``, of the flattened tensor, in order."""
    if not shape:
        yield (), ()
        return
    row, position, stop = prod(shape[1:]), start, start + length
    while position < stop:
        first, inside = divmod(position, row)
        size = min(row - inside, stop - position)
        if size < row:
            for offsets, extent in flat_boxes(shape[1:], inside, size):
                yield (first, *offsets), (1, *extent)
        else:
            count = (stop - position) // row
            yield (first, *(0,) * len(shape[1:])), (count, *shape[1:])
            size = count * row
        position += size
