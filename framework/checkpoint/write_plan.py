"""Assignment of shards to the ranks that write them, computed by every rank from the same gathered plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.errors import ConfigurationError
from .manifest import JSON, RANKS, SECTION_NAME, Box, TensorRecord, coverage_problem, is_flat
from .safetensors_header import RESERVED_NAME
from .safetensors_io import code_of, size_of


@dataclass(frozen=True)
class Shard:
    """One rank's piece of a global tensor: the box at ``offsets`` of a tensor of ``shape``.

    If there is one offset but ``shape`` does not have one dim, the piece is 1-d: a range of the flattened (row-major)
    tensor, like a ZeRO partition. Create it with ``whole``, ``flat`` or the constructor.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, tensor: Tensor) -> Shard:
        """Return a shard that covers the full tensor."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    @classmethod
    def flat(cls, tensor: Tensor, shape: tuple[int, ...], start: int) -> Shard:
        """Return a shard of the 1-d ``tensor``: the elements beginning at ``start`` of the flattened tensor of
        ``shape``."""
        return cls(tensor, tuple(shape), (start,))


@dataclass
class CheckpointContents:
    """This rank's contents of a checkpoint.

    ``sections`` maps a section (``"model"``, ``"optimizer"``, ``"state"``) to tensors by name. ``document`` is saved
    from rank 0 only, ``rank_document`` from every rank, as a list. Both are strict JSON (``codec.encode``).
    """

    sections: dict[str, dict[str, Shard]]
    document: JSON = field(default_factory=dict)
    rank_document: JSON = None
    buffers: Set[str] = frozenset()
    """Names in ``"model"`` that are not weights: a buffer may be infinite in a good model."""
    left_out: Mapping[str, TensorRecord] = field(default_factory=dict)
    """Tensors of the model that are not saved, with their fingerprints. Those of rank 0 are used."""


Snapshot = CheckpointContents
"""The former name, for programs that import it from ``phalanx.checkpoint``."""


@dataclass(frozen=True)
class Piece:
    """A rank's description of a shard for the other ranks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    tied_to: str | None


Plan: TypeAlias = "dict[str, dict[str, Piece]]"
# For each section and name: the name that it is tied to, or the rank that writes each box.
Assignment: TypeAlias = "dict[str, dict[str, str | list[tuple[int, Box]]]]"


def plan_of(contents: CheckpointContents) -> Plan:
    """Check this rank's shards and describe them."""
    plan: Plan = {}
    for section, shards in contents.sections.items():
        if SECTION_NAME.fullmatch(section) is None:
            raise ConfigurationError(f"section {section!r} must consist of lower-case letters, digits and underscores.")
        if section == RANKS:
            raise ConfigurationError(f"section {section!r} is the one of rank_document=; choose another name.")
        pieces = plan.setdefault(section, {})
        seen: dict[tuple[Any, ...], str] = {}
        for name, shard in shards.items():
            _check_shard(section, name, shard)
            box = (tuple(shard.offsets), tuple(shard.tensor.shape))
            tied_to = seen.setdefault(memory_of(shard, name), name)
            tied = None if tied_to == name else tied_to
            pieces[name] = Piece(shard.tensor.dtype, tuple(shard.shape), box, tied)
    return plan


def _check_shard(section: str, name: str, shard: Shard) -> None:
    tensor, where = shard.tensor, f"{section} tensor {name!r}"
    if type(name) is not str or name == RESERVED_NAME:
        raise ConfigurationError(f"{where} needs another name: a string, and not {RESERVED_NAME!r}.")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        kind = f"layout {tensor.layout}, device {tensor.device}"
        raise ConfigurationError(f"{where} is not a dense tensor with data ({kind}); materialise it first.")
    code_of(tensor.dtype, name)
    fits = is_flat(shard.shape, shard.offsets) or len(shard.shape) == len(shard.offsets)
    dims = 1 if is_flat(shard.shape, shard.offsets) else len(shard.shape)
    if not fits or tensor.dim() != dims or any(size < 0 for size in (*shard.shape, *shard.offsets)):
        raise ConfigurationError(
            f"{where}: a piece of shape {list(tensor.shape)} at {list(shard.offsets)} does not fit {list(shard.shape)}."
        )


def memory_of(shard: Shard, name: str) -> tuple[Any, ...]:
    """Return a key that two tied tensors share: the same elements of the same storage, as the same piece."""
    tensor = shard.tensor
    if tensor.numel() == 0:
        return (name,)
    pointer = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.stride())
    return (*pointer, tensor.dtype, tuple(tensor.shape), tensor.is_conj(), tensor.is_neg(), shard.shape, shard.offsets)


def assign(plans: list[Plan]) -> Assignment:
    """Assign boxes to ranks; the result is the same on every rank, since it depends only on the gathered plans."""
    assignment: Assignment = {}
    load = [0] * len(plans)
    for section in dict.fromkeys(section for plan in plans for section in plan):
        held: dict[str, list[tuple[int, Piece]]] = {}
        for rank, plan in enumerate(plans):
            for name, piece in plan.get(section, {}).items():
                held.setdefault(name, []).append((rank, piece))
        tensors = assignment.setdefault(section, {})
        for name, pieces in held.items():
            tied = _tied(pieces)
            tensors[name] = tied if tied is not None else _writers(section, name, pieces, load)
    return assignment


def _tied(pieces: list[tuple[int, Piece]]) -> str | None:
    """Return the name to which this tensor is tied on all ranks that have data of it, or None."""
    owners = {piece.tied_to for _, piece in pieces if prod(piece.box[1])}
    return owners.pop() if len(owners) == 1 else None


def _writers(section: str, name: str, pieces: list[tuple[int, Piece]], load: list[int]) -> list[tuple[int, Box]]:
    """Return the rank that writes each box; if several hold a box, the one with the least to write so far."""
    first = pieces[0][1]
    holders: dict[Box, list[int]] = {}
    for rank, piece in pieces:
        if (piece.dtype, piece.shape) != (first.dtype, first.shape):
            given = f"{piece.dtype} {list(piece.shape)} on rank {rank}, {first.dtype} {list(first.shape)} elsewhere"
            raise ConfigurationError(f"{section} tensor {name!r} differs between ranks: {given}.")
        if prod(piece.box[1]) or not prod(first.shape):
            holders.setdefault(piece.box, []).append(rank)
    if not prod(first.shape):
        holders = dict(list(holders.items())[:1])
    problem = coverage_problem(first.shape, holders)
    if problem is not None:
        raise ConfigurationError(f"{section} tensor {name!r} is not covered exactly once by its shards: {problem}.")
    writers = []
    for box in sorted(holders):
        rank = min(holders[box], key=lambda one: load[one])
        load[rank] += size_of(box[1], first.dtype)
        writers.append((rank, box))
    return writers


def part_at(whole: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Return the part of a shape at offsets, a view."""
    for dim, (start, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole
