"""``Board``: sums of a few numbers over the ranks of one node, through shared memory.

A reduction on gloo wakes a thread in every rank, which takes the core from the rank's own work: 1 ms of a step of 60
ms, where there are as many ranks as cores. Here each rank writes its numbers into its own slot, and reads the slots of
the others when it needs the sum: without a thread, and without a system call unless a rank is late.

Reductions are numbered, identically on all ranks. A rank has at most ``_DEPTH / 4`` of them open at a time, so every
rank has read a slot before it is reused. A slot that was reused too early is detected by its number and never summed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import DesyncError, RankError
from ..system.processes import is_running
from .object_frames import all_gather_object, broadcast_object

CAPACITY = 32
"""The largest number of elements in a reduction."""
_DEPTH = 8
_HEAD = struct.Struct("<QII")
_SLOT_BYTES = _HEAD.size + 8 * CAPACITY
TOKEN_BYTES = 16
# Poll for a late rank without sleeping at first, since most are microseconds late; then with growing sleeps.
_EAGER_LOOKS = 200
_LONGEST_SLEEP = 0.001
_ASK_SECONDS = 0.2
_LIMIT_SECONDS = 1800.0


class SharedMemory:
    """Anonymous shared memory, freed with the last process that holds it."""

    def __init__(self, size: int, place: tuple[int, int] | None = None) -> None:
        """Create the memory, or open that of another process of this user, given by ``place`` (pid, descriptor).

        Raises:
            OSError: this system does not support memory files, or the process is not on this node.
        """
        if place is None:
            if not hasattr(os, "memfd_create"):
                raise OSError("this system has no memory files")
            file = os.memfd_create("phalanx-board")
        else:
            file = os.open("/proc/{}/fd/{}".format(*place), os.O_RDWR)
        self.place = (os.getpid(), file)
        self._file = file
        if place is None:
            os.ftruncate(file, size)
        self.bytes = mmap.mmap(file, size)

    def release_name(self) -> None:
        """Close the descriptor through which other processes open the memory; the mapping stays."""
        os.close(self._file)

    def close(self) -> None:
        """Release the memory."""
        self.bytes.close()


class Board:
    """Reduction slots of the ranks of one node; ``pids`` are their processes, in rank order."""

    def __init__(self, memory: SharedMemory, rank: int, pids: Sequence[int]) -> None:
        self._memory = memory
        self._bytes = memory.bytes
        self._rank = rank
        self._pids = list(pids)
        self._number = 0

    @staticmethod
    def size(ranks: int) -> int:
        """Return the size in bytes of a board for ``ranks`` ranks, including a token that identifies it.

        The slots are followed by one byte per rank, which is set once the rank has left.
        """
        return ranks * (_DEPTH * _SLOT_BYTES + 1) + TOKEN_BYTES

    def post(self, vector: Tensor) -> Posted:
        """Start summing a 1-d float64 CPU tensor of at most ``CAPACITY`` elements over all ranks, in place."""
        self._number += 1
        numbers = vector.tolist()
        payload = struct.pack(f"<{len(numbers)}d", *numbers)
        head = _HEAD.pack(self._number, len(numbers), _checksum(self._number, payload))
        start = self._start(self._rank, self._number)
        # The checksum shows a reader whether all bytes have arrived, in whatever order this processor writes.
        self._bytes[start + _HEAD.size : start + _HEAD.size + len(payload)] = payload
        self._bytes[start : start + _HEAD.size] = head
        return Posted(self, self._number, vector, numbers)

    def look(self, rank: int, number: int, count: int) -> tuple[float, ...] | None:
        """Return the numbers that a rank wrote for a reduction, or None if it has not written yet.

        Raises:
            DesyncError: the rank is past this reduction, or has a different number of elements.
        """
        start = self._start(rank, number)
        found, length, checksum = _HEAD.unpack_from(self._bytes, start)
        if found < number:
            return None
        if found > number:
            raise DesyncError(
                f"rank {rank} is at control reduction {found}, this rank {self._rank} at {number}: every rank must run "
                "the same loop. Look for a condition on the rank around a step or a fit."
            )
        payload = self._bytes[start + _HEAD.size : start + _HEAD.size + 8 * min(length, CAPACITY)]
        if checksum != _checksum(number, payload):
            return None
        if length != count:
            raise DesyncError(
                f"rank {rank} reduces {length} numbers where this rank {self._rank} reduces {count}: every rank must "
                "run the same loop. Look for a condition on the rank around a step or a fit."
            )
        return struct.unpack(f"<{length}d", payload)

    def wait(self, rank: int, number: int, count: int) -> tuple[float, ...]:
        """Wait for the numbers that a rank writes for a reduction, and return them.

        Raises:
            RankError: the rank has left, its process is gone, or it has not written for half an hour.
        """
        looks, since, asked = 0, 0.0, 0.0
        while (found := self.look(rank, number, count)) is None:
            looks += 1
            if looks < _EAGER_LOOKS:
                os.sched_yield()
                continue
            # The rank may have written after the last poll, before it left.
            if self._bytes[self._left_at(rank)] and self.look(rank, number, count) is None:
                raise RankError(f"rank {rank} (pid {self._pids[rank]}) has left, and rank {self._rank} waits for it.")
            now = time.monotonic()
            since, asked = since or now, asked or now
            if now - asked > _ASK_SECONDS:
                asked = now
                self._check_alive(rank, now - since)
            time.sleep(min(_LONGEST_SLEEP, 2e-5 * (looks - _EAGER_LOOKS + 1)))
        return found

    def _check_alive(self, rank: int, waited: float) -> None:
        if not is_running(self._pids[rank]):
            raise RankError(f"rank {rank} (pid {self._pids[rank]}) is gone, and rank {self._rank} waits for it.")
        if waited > _LIMIT_SECONDS:
            raise RankError(
                f"rank {rank} (pid {self._pids[rank]}) has kept rank {self._rank} waiting for "
                f"{waited:.0f} s: look at what it does with py-spy dump --pid {self._pids[rank]}."
            )

    def __len__(self) -> int:
        return len(self._pids)

    @staticmethod
    def _start(rank: int, number: int) -> int:
        return (rank * _DEPTH + number % _DEPTH) * _SLOT_BYTES

    def _left_at(self, rank: int) -> int:
        return len(self) * _DEPTH * _SLOT_BYTES + rank

    def close(self) -> None:
        """Mark this rank as having left, and release the memory."""
        self._bytes[self._left_at(self._rank)] = 1
        self._memory.close()


def share_board(group: dist.ProcessGroup) -> Board | None:
    """Return the board of a group whose ranks are on one node; None if a rank cannot open it. Collective."""
    token, memory = os.urandom(TOKEN_BYTES), None
    size = Board.size(group.size())
    with contextlib.suppress(OSError):
        memory = SharedMemory(size) if group.rank() == 0 else None
    offer = broadcast_object(None if memory is None else (memory.place, token), 0, group)
    if offer is not None and memory is None:
        with contextlib.suppress(OSError, ValueError):
            memory = SharedMemory(size, offer[0])
    elif memory is not None:
        memory.bytes[-TOKEN_BYTES:] = token
    group.barrier().wait()
    # In another container the same pid may belong to another process, with other memory.
    known = memory is not None and offer is not None and memory.bytes[-TOKEN_BYTES:] == offer[1]
    answers = all_gather_object((known, os.getpid()), group)
    if memory is not None:
        memory.release_name()
    if all(good for good, _ in answers) and memory is not None:
        return Board(memory, group.rank(), [pid for _, pid in answers])
    if memory is not None:
        memory.close()
    return None


class Posted:
    """A reduction in progress."""

    __slots__ = ("_board", "_number", "_numbers", "_vector")

    def __init__(self, board: Board, number: int, vector: Tensor, numbers: list[float]) -> None:
        self._board, self._number, self._vector, self._numbers = board, number, vector, numbers

    def wait(self) -> bool:
        """Wait until all ranks have written; store the sum, added in rank order, in the vector. Collective."""
        board, count = self._board, len(self._numbers)
        rows = [board.wait(rank, self._number, count) for rank in range(len(board))]
        self._vector.copy_(torch.tensor([sum(column) for column in zip(*rows, strict=True)], dtype=torch.float64))
        return True

    def is_completed(self) -> bool:
        """Whether all ranks have written."""
        board, count = self._board, len(self._numbers)
        return all(board.look(rank, self._number, count) is not None for rank in range(len(board)))


def _checksum(number: int, payload: bytes) -> int:
    return zlib.crc32(payload, number & 0xFFFFFFFF)
