"""Tensors of canonical state, read on demand and in parts, from a checkpoint or from memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .reader import Checkpoint
from .tiling import is_flat
from .write_plan import Shard


class StoredTensor(Protocol):
    """A full tensor, of which a rank reads the part that it needs, onto the CPU."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the tensor was saved."""

    def read(self) -> Tensor:
        """Return the full tensor."""

    def read_slice(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """Return the box of ``shape`` at ``offsets``."""

    def read_flat(self, start: int, length: int) -> Tensor:
        """Return ``length`` elements, beginning at ``start``, of the flattened (row-major) tensor, as a 1-d tensor."""


class SavedTensor:
    """A tensor of a checkpoint's section."""

    __slots__ = ("_checkpoint", "_name", "_section")

    def __init__(self, checkpoint: Checkpoint, section: str, name: str) -> None:
        self._checkpoint, self._section, self._name = checkpoint, section, name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._checkpoint.shape(self._section, self._name))

    @property
    def dtype(self) -> torch.dtype:
        return self._checkpoint.dtype(self._section, self._name)

    def read(self) -> Tensor:
        return self._checkpoint.read(self._section, self._name)

    def read_slice(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        return self._checkpoint.read_slice(self._section, self._name, offsets, shape)

    def read_flat(self, start: int, length: int) -> Tensor:
        return self._checkpoint.read_flat(self._section, self._name, start, length)


class HeldTensor:
    """A tensor in memory."""

    __slots__ = ("_tensor", "dtype", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def read(self) -> Tensor:
        return self._tensor

    def read_slice(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        part = self._tensor
        for dim, (start, size) in enumerate(zip(offsets, shape, strict=True)):
            part = part.narrow(dim, start, size)
        return part

    def read_flat(self, start: int, length: int) -> Tensor:
        return self._tensor.reshape(-1).narrow(0, start, length)


class HeldShard:
    """A tensor of which this rank has one piece in memory; only that piece, or a range of it, can be read."""

    __slots__ = ("_shard", "dtype", "shape")

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.shape, self.dtype = shard.shape, shard.tensor.dtype

    def read(self) -> Tensor:
        return self.read_slice((0,) * len(self.shape), self.shape)

    def read_slice(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        piece = self._shard
        assert piece.tensor.numel() == 0 or (tuple(offsets), tuple(shape)) == (piece.offsets, tuple(piece.tensor.shape))
        return piece.tensor

    def read_flat(self, start: int, length: int) -> Tensor:
        piece = self._shard
        # A box of several dims is not a range of the flattened tensor, unless it covers the tensor.
        assert not length or piece.tensor.dim() == 1 or tuple(piece.tensor.shape) == piece.shape
        begin = piece.offsets[0] if piece.offsets else 0
        return piece.tensor.reshape(-1).narrow(0, start - begin if length else 0, length)


StoredTensors = Mapping[str, StoredTensor]


def read_piece(stored: StoredTensor, shard: Shard) -> Tensor:
    """Read the piece of a stored tensor that corresponds to a shard."""
    if is_flat(shard.shape, shard.offsets):
        return stored.read_flat(shard.offsets[0], shard.tensor.numel())
    return stored.read_slice(shard.offsets, tuple(shard.tensor.shape))


def held(tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Wrap tensors in memory as stored tensors."""
    return {name: HeldTensor(tensor) for name, tensor in tensors.items()}
