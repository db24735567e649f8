"""Exchange of pickled objects between the ranks of a CPU group, in frames: a header with the length, then the object.

All ranks use the same buffer size, so one collective is enough for a small object. The header gives the length of a
larger object, which a second collective transfers.
"""

from __future__ import annotations

import pickle
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

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


def broadcast_object(obj: T, src: int, group: dist.ProcessGroup) -> T:
    """Return the object of rank ``src``. Collective."""
    is_source = group.rank() == src
    payload = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL) if is_source else b""
    buffer = framed(payload, BUFFER_BYTES)
    dist.broadcast(as_tensor(buffer), src, group=group)
    length = length_of(buffer)
    data = buffer[HEADER_BYTES : HEADER_BYTES + length]
    if length > BUFFER_BYTES - HEADER_BYTES:
        data = bytearray(payload) if is_source else bytearray(length)
        dist.broadcast(as_tensor(data), src, group=group)
    return obj if is_source else pickle.loads(data)


def all_gather_object(obj: T, group: dist.ProcessGroup, size: FrameSize | None = None) -> list[T]:
    """Return the objects of all ranks. A repeated exchange passes its own ``size``. Collective."""
    payload = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    room = frame_bytes(group.size()) if size is None else size.of(group.size())
    frames = _gather_bytes(framed(payload, room), group)
    lengths = [length_of(frame) for frame in frames]
    longest = max(lengths)
    if size is not None:
        size.record(longest)
    start = HEADER_BYTES
    if longest > room - HEADER_BYTES:
        frames, start = _gather_bytes(bytearray(payload.ljust(longest, b"\0")), group), 0
    return [pickle.loads(frame[start : start + length]) for frame, length in zip(frames, lengths, strict=True)]


def gather_object(obj: T, group: dist.ProcessGroup) -> list[T] | None:
    """Return the objects of all ranks on rank 0, None on others. Two collectives."""
    payload = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    longest = torch.tensor([len(payload)])
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    room = HEADER_BYTES + int(longest)
    frames = [bytearray(room) for _ in range(group.size())] if group.rank() == 0 else []
    into = [as_tensor(frame) for frame in frames] or None
    dist.gather(as_tensor(framed(payload, room)), into, dst=0, group=group)
    if into is None:
        return None
    return [pickle.loads(frame[HEADER_BYTES : HEADER_BYTES + length_of(frame)]) for frame in frames]


def _gather_bytes(source: bytearray, group: dist.ProcessGroup) -> list[memoryview]:
    """Gather buffers of the same length in one collective."""
    gathered = [bytearray(len(source)) for _ in range(group.size())]
    dist.all_gather([as_tensor(buffer) for buffer in gathered], as_tensor(source), group=group)
    return [memoryview(buffer) for buffer in gathered]
