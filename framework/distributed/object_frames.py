"""Buffers for exchanging pickled objects between ranks: a header with the length, then the object if it fits.

All ranks use the same buffer size, so one collective is enough for a small object. The header gives the length of a
larger object, which a second collective transfers.
"""

from __future__ import annotations

import torch
from torch import Tensor

BUFFER_BYTES = 16 * 1024
HEADER_BYTES = 8
# Limits for exchanges between many ranks: for all buffers together, and for each buffer.
_EXCHANGE_BYTES = 1 << 20
_LEAST_BYTES = 512


def frame_bytes(ranks: int) -> int:
    """Return the buffer size, in bytes, for an exchange of objects between ``ranks`` ranks."""
    return max(_LEAST_BYTES, min(BUFFER_BYTES, _EXCHANGE_BYTES // ranks))


class FrameSize:
    """Buffer size of a repeated exchange: the default at first, then large enough for its largest object.

    Every rank sees the lengths of all objects, so all ranks choose the same size without communication.
    """

    def __init__(self) -> None:
        self._longest = 0

    def record(self, longest: int) -> None:
        """Record the length, in bytes, of the longest object of an exchange."""
        self._longest = max(self._longest, longest)

    def of(self, ranks: int) -> int:
        """Return the size in bytes of the next exchange's buffers."""
        if not self._longest:
            return frame_bytes(ranks)
        # Twice the length: the objects of the next exchange may be longer by a few digits, which costs no collective.
        needed = 2 * self._longest + HEADER_BYTES
        return min(frame_bytes(ranks), max(_LEAST_BYTES, 1 << (needed - 1).bit_length()))


def framed(payload: bytes, size: int) -> bytearray:
    """Return a buffer of ``size`` bytes with the length of a payload, and the payload if there is room for it."""
    buffer = bytearray(size)
    buffer[:HEADER_BYTES] = len(payload).to_bytes(HEADER_BYTES, "little")
    if len(payload) <= size - HEADER_BYTES:
        buffer[HEADER_BYTES : HEADER_BYTES + len(payload)] = payload
    return buffer


def length_of(frame: bytearray | memoryview) -> int:
    """Return the length, in bytes, of the payload of a buffer."""
    return int.from_bytes(frame[:HEADER_BYTES], "little")


def as_tensor(buffer: bytearray) -> Tensor:
    """Return a buffer as a tensor of bytes that shares its memory."""
    return torch.frombuffer(buffer, dtype=torch.uint8)
