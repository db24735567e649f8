"""Comparison of two checkpoints: names, shapes, dtypes, values, and all values other than tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from ..core.arguments import names_arguments
from ..core.errors import CheckpointError
from .fingerprint import fingerprint
from .manifest import JSON, MODEL, RANKS
from .reader import Checkpoint, open_checkpoint

_CHUNK_ELEMENTS = 1 << 21
_MAX_TEXT = 80
_MISSING = "(not there)"


@dataclass(frozen=True)
class ValueDifference:
    """The number of elements that differ and the largest difference.

    NaN equals NaN; the difference between NaN and a number is infinity.
    """

    elements: int
    different: int
    max_abs: float


@dataclass
class SectionDifference:
    """The differences in a section. ``shapes`` and ``dtypes`` hold the values of both checkpoints, in order."""

    only_in_first: list[str] = field(default_factory=list)
    only_in_second: list[str] = field(default_factory=list)
    shapes: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, ValueDifference] = field(default_factory=dict)
    fingerprints: list[str] = field(default_factory=list)
    """Tensors that differ, and that at least one of the checkpoints leaves out: the values are not known."""
    same: int = 0
    """The number of tensors that are equal in name, shape, dtype and every element."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        names = (self.only_in_first, self.only_in_second, self.shapes, self.dtypes, self.values, self.fingerprints)
        return not any(names)


@dataclass
class Difference:
    """The differences between two checkpoints; the layout over files and ranks and the time of saving do not count."""

    sections: dict[str, SectionDifference]
    documents: list[tuple[str, str, str]]
    """The paths of differing values other than tensors, such as ``document/progress/global_step``, and both values as
    text."""

    @property
    def equal(self) -> bool:
        """Whether the two checkpoints have equal contents."""
        return not self.documents and all(section.equal for section in self.sections.values())


@names_arguments
def diff(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Difference:
    """Compare two checkpoints, saved under any strategy and number of ranks. Reads and verifies every tensor.

    Raises:
        CheckpointError: one of them is missing or damaged.
    """
    one, other = open_checkpoint(first), open_checkpoint(second)
    # The documents of the ranks are compared value by value.
    names = dict.fromkeys(name for name in [*one.sections, *other.sections] if name != RANKS)
    try:
        documents = [*_documents(one.document, other.document, "document", 0)]
        documents += _documents(one.rank_documents, other.rank_documents, "rank_documents", 0)
    except RecursionError as error:
        raise CheckpointError(f"a document of {one.path} or {other.path} is nested too deep; it is damaged.") from error
    return Difference({name: _section(one, other, name) for name in names}, documents)


def _section(one: Checkpoint, other: Checkpoint, section: str) -> SectionDifference:
    mine, theirs = (dict.fromkeys(_names(checkpoint, section)) for checkpoint in (one, other))
    found = SectionDifference(
        only_in_first=[name for name in mine if name not in theirs],
        only_in_second=[name for name in theirs if name not in mine],
    )
    for name in mine:
        if name in theirs:
            _tensor(one, other, section, name, found)
    return found


def _names(checkpoint: Checkpoint, section: str) -> list[str]:
    return checkpoint.names(section) if section in checkpoint.sections else []


def _tensor(one: Checkpoint, other: Checkpoint, section: str, name: str, found: SectionDifference) -> None:
    shapes = one.shape(section, name), other.shape(section, name)
    dtypes = one.dtype(section, name), other.dtype(section, name)
    if dtypes[0] != dtypes[1]:
        found.dtypes[name] = (_short(dtypes[0]), _short(dtypes[1]))
    if shapes[0] != shapes[1]:
        found.shapes[name] = (list(shapes[0]), list(shapes[1]))
        return
    if section == MODEL and name in one.left_out | other.left_out:
        if _fingerprint(one, name) != _fingerprint(other, name):
            found.fingerprints.append(name)
        elif dtypes[0] == dtypes[1]:
            found.same += 1
        return
    values = _values(one, other, section, name, prod(shapes[0]))
    if values.different:
        found.values[name] = values
    elif dtypes[0] == dtypes[1]:
        found.same += 1


def _fingerprint(checkpoint: Checkpoint, name: str) -> str | None:
    record = checkpoint.left_out.get(name)
    return fingerprint(checkpoint.read(MODEL, name)) if record is None else record.fingerprint


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _values(one: Checkpoint, other: Checkpoint, section: str, name: str, elements: int) -> ValueDifference:
    different, largest = 0, 0.0
    for start in range(0, elements, _CHUNK_ELEMENTS):
        size = min(_CHUNK_ELEMENTS, elements - start)
        count, distance = _distance(
            one.read_flat(section, name, start, size), other.read_flat(section, name, start, size)
        )
        different, largest = different + count, max(largest, distance)
    return ValueDifference(elements, different, largest)


def _distance(one: Tensor, other: Tensor) -> tuple[int, float]:
    """Return the number of elements that differ, and the largest difference."""
    if one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
        return 0, 0.0
    exact = one.dtype == other.dtype and not one.is_floating_point() and not one.is_complex()
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    a, b = one.to(wide), other.to(wide)
    # Integers beyond 2**53 may differ although they are equal as doubles.
    unequal = one.view(_bits(one)) != other.view(_bits(other)) if exact else a != b
    unequal &= ~(a.isnan() & b.isnan())
    count = int(unequal.sum())
    if not count:
        return 0, 0.0
    distances = (a[unequal] - b[unequal]).abs()
    largest = distances.nan_to_num(nan=torch.inf, posinf=torch.inf).max().item()
    return count, float(largest)


def _bits(tensor: Tensor) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]


def _documents(one: JSON, other: JSON, path: str, depth: int) -> Iterator[tuple[str, str, str]]:
    """Yield the paths at which two documents differ. Values nested deeper than a hundred levels are compared as one."""
    if type(one) is dict and type(other) is dict and depth < 100:
        for key in dict.fromkeys([*one, *other]):
            here = f"{path}/{key}"
            if key not in one or key not in other:
                yield here, _text(one[key]) if key in one else _MISSING, _text(other[key]) if key in other else _MISSING
            else:
                yield from _documents(one[key], other[key], here, depth + 1)
    elif type(one) is list and type(other) is list and len(one) == len(other) and depth < 100:
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from _documents(*pair, f"{path}/{index}", depth + 1)
    elif _text(one, None) != _text(other, None):
        yield path, _text(one), _text(other)


def _text(value: Any, limit: int | None = _MAX_TEXT) -> str:
    """Return JSON text, which distinguishes 1, 1.0 and true; shortened for display."""
    text = json.dumps(value)
    return text if limit is None or len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"
