"""Fingerprints of tensors that do not depend on how a tensor is divided over ranks.

The fingerprint is the sum of a 64-bit hash of each element's bits and position, modulo 2^64. Ranks compute the sums of
their own pieces, and the sum over ranks is the fingerprint of the full tensor. It detects changes of weights; it does
not protect against a deliberate forgery.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from .manifest import is_flat
from .write_plan import Shard

# Memory for temporary values, and so the size at which they stay in a processor's cache.
_CHUNK_ELEMENTS = 1 << 16
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers of 64 bits: the golden ratio, and the constants of MurmurHash3's finalizer, as signed numbers.
_GOLDEN, _FIRST, _SECOND = (
    number - (1 << 64) for number in (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
)
_MASK = (1 << 64) - 1


@torch.no_grad()
def fingerprint_sum(shard: Shard) -> Tensor:
    """Return the contribution of a piece to the fingerprint of its tensor: an int64 scalar on the piece's device."""
    tensor, shape = shard.tensor.detach(), shard.shape
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    if is_flat(shape, shard.offsets):
        return total + _sum_of_range(tensor.reshape(-1), shard.offsets[0])
    if tensor.shape[1:] == shape[1:]:
        return total + _sum_of_range(tensor.reshape(-1), shard.offsets[0] * prod(shape[1:]) if shape else 0)
    # A box that is cut in another dim than the first: its rows are ranges of the flattened tensor.
    for index, row in enumerate(tensor.unbind()):
        positions = torch.full((), (shard.offsets[0] + index) * prod(shape[1:]), device=tensor.device)
        for dim, (start, size) in enumerate(zip(shard.offsets[1:], row.shape, strict=True), 1):
            places = torch.arange(start, start + size, device=tensor.device) * prod(shape[dim + 1 :])
            positions = positions.unsqueeze(-1) + places
        total += _hashed(_bits(row.contiguous()), positions)
    return total


def fingerprint_text(total: int) -> str:
    """Return the 16 hexadecimal digits of a full tensor's sum."""
    return f"{total & _MASK:016x}"


def fingerprint(tensor: Tensor) -> str:
    """Return the fingerprint of a full tensor."""
    return fingerprint_text(int(fingerprint_sum(Shard.whole(tensor))))


def _sum_of_range(flat: Tensor, start: int) -> Tensor:
    """Return the sum for elements of the flattened tensor, beginning at ``start``."""
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), _CHUNK_ELEMENTS):
        piece = flat.narrow(0, begin, min(_CHUNK_ELEMENTS, flat.numel() - begin))
        positions = torch.arange(start + begin, start + begin + piece.numel(), device=flat.device)
        total += _hashed(_bits(piece), positions)
    return total


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of each element as int64."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize]).to(torch.int64)


def _hashed(bits: Tensor, positions: Tensor) -> Tensor:
    """Return the sum of the hashes of elements; ``positions`` is overwritten."""
    mixed = positions.mul_(_GOLDEN).add_(bits)
    for factor in (_FIRST, _SECOND):
        mixed.bitwise_xor_(mixed >> 33).mul_(factor)
    return mixed.bitwise_xor_(mixed >> 33).sum()
