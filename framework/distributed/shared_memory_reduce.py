"""``Board``: sums of a few numbers over the ranks of one node, through shared memory.

A reduction on gloo wakes a thread in every rank, which takes the core from the rank's own work: 1 ms of a step of 60
ms, where there are as many ranks as cores. Here each rank writes its numbers into its own slot, and reads the slots of
the others when it needs the sum: without a thread, and without a system call unless a rank is late.

With several nodes, what a rank writes is the sum over its column, which is a group of ranks of all nodes: see
``node_board.py``. gloo computes that sum in the background, and its thread writes the slot.

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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import DesyncError, RankError
from ..system.processes import is_running

CAPACITY = 32
"""The largest number of elements in a reduction."""
_DEPTH = 8
_HEAD = struct.Struct("<QII")
_NUMBERS = [struct.Struct(f"<{count}d") for count in range(CAPACITY + 1)]
_SLOT_BYTES = _HEAD.size + 8 * CAPACITY
TOKEN_BYTES = 16
# Poll for a late rank without sleeping at first, since most are microseconds late; then with growing sleeps.
_EAGER_LOOKS = 200
_LONGEST_SLEEP = 0.001
_ASK_SECONDS = 0.2
_LOW = 0xFFFFFFFF
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


@dataclass(frozen=True)
class Node:
    """The ranks of one node in ascending order, and their processes."""

    ranks: Sequence[int]
    pids: Sequence[int]
    columns: int
    """The first so many of them write the numbers that are summed."""


class Board:
    """Reduction slots of the ranks of one node.

    Args:
        memory: at least ``Board.size(len(node.ranks))`` bytes.
        index: the position of this rank in ``node.ranks``.
        node: the ranks of this node.
        column: the gloo group of this rank's column, None if there is one node.
    """

    def __init__(self, memory: SharedMemory, index: int, node: Node, column: Any = None) -> None:
        self._memory = memory
        self._bytes = memory.bytes
        self.index = index
        self.columns = node.columns
        """The number of slots that hold a part of a sum."""
        self._node = node
        self._column = column
        self._number = 0
        self._writes = index < node.columns
        self._starts = [
            [(rank * _DEPTH + slot) * _SLOT_BYTES for slot in range(_DEPTH)] for rank in range(len(node.ranks))
        ]

    @staticmethod
    def size(ranks: int) -> int:
        """Return the size in bytes of a board for ``ranks`` ranks, including a token that identifies it.

        The slots are followed by one byte per rank, which is set once the rank has left.
        """
        return ranks * (_DEPTH * _SLOT_BYTES + 1) + TOKEN_BYTES

    def post(self, numbers: Sequence[float]) -> Posted:
        """Start summing at most ``CAPACITY`` numbers over all ranks."""
        self._number += 1
        if self._column is not None:
            vector = torch.tensor(numbers, dtype=torch.float64)
            return PostedInColumn(self, self._number, vector, self._column.allreduce([vector]))
        self.write(self._number, numbers)
        return Posted(self, self._number, len(numbers), numbers if self._writes else None)

    def write(self, number: int, numbers: Sequence[float]) -> None:
        """Write this rank's numbers for a reduction, if it is one of those that write."""
        if not self._writes:
            return
        payload = _NUMBERS[len(numbers)].pack(*numbers)
        head = _HEAD.pack(number, len(numbers), zlib.crc32(payload, number & _LOW))
        begin = self._starts[self.index][number % _DEPTH] + _HEAD.size
        # The checksum shows a reader whether all bytes have arrived, in whatever order this processor writes.
        self._bytes[begin : begin + len(payload)] = payload
        self._bytes[begin - _HEAD.size : begin] = head

    def look(self, index: int, number: int, count: int) -> tuple[float, ...] | None:
        """Return the numbers in a slot for a reduction, or None if they have not been written yet.

        Raises:
            DesyncError: the rank is past this reduction, or has a different number of elements.
        """
        start = self._starts[index][number % _DEPTH]
        found, length, checksum = _HEAD.unpack_from(self._bytes, start)
        if found < number:
            return None
        rank = self._node.ranks[index]
        if found > number:
            raise DesyncError(
                f"rank {rank} is at control reduction {found}, this rank {self._own_rank} at {number}: every rank "
                "must run the same loop. Look for a condition on the rank around a step or a fit."
            )
        payload = self._bytes[start + _HEAD.size : start + _HEAD.size + 8 * min(length, CAPACITY)]
        if checksum != zlib.crc32(payload, number & _LOW):
            return None
        if length != count:
            raise DesyncError(
                f"rank {rank} reduces {length} numbers where this rank {self._own_rank} reduces {count}: every rank "
                "must run the same loop. Look for a condition on the rank around a step or a fit."
            )
        numbers: tuple[float, ...] = _NUMBERS[length].unpack(payload)
        return numbers

    def wait(self, index: int, number: int, count: int) -> tuple[float, ...]:
        """Wait for the numbers in a slot for a reduction, and return them.

        Raises:
            RankError: the rank has left, its process is gone, or it has not written for half an hour.
        """
        looks, since, asked = 0, 0.0, 0.0
        while (found := self.look(index, number, count)) is None:
            looks += 1
            if looks < _EAGER_LOOKS:
                os.sched_yield()
                continue
            # The rank may have written after the last poll, before it left.
            if self._bytes[self._left_at(index)] and self.look(index, number, count) is None:
                raise RankError(f"{self._title(index)} has left, and rank {self._node.ranks[self.index]} waits for it.")
            now = time.monotonic()
            since, asked = since or now, asked or now
            if now - asked > _ASK_SECONDS:
                asked = now
                self._check_alive(index, now - since)
            time.sleep(min(_LONGEST_SLEEP, 2e-5 * (looks - _EAGER_LOOKS + 1)))
        return found

    def _check_alive(self, index: int, waited: float) -> None:
        pid = self._node.pids[index]
        if not is_running(pid):
            raise RankError(f"{self._title(index)} is gone, and rank {self._own_rank} waits for it.")
        if waited > _LIMIT_SECONDS:
            beyond = ", or a rank of another node has kept both" if self._column is not None else ""
            raise RankError(
                f"{self._title(index)} has kept rank {self._own_rank} waiting for {waited:.0f} s{beyond}: look at "
                f"what it does with py-spy dump --pid {pid}."
            )

    def _title(self, index: int) -> str:
        return f"rank {self._node.ranks[index]} (pid {self._node.pids[index]})"

    @property
    def _own_rank(self) -> int:
        return self._node.ranks[self.index]

    def _left_at(self, index: int) -> int:
        return len(self._node.ranks) * _DEPTH * _SLOT_BYTES + index

    def close(self) -> None:
        """Mark this rank as having left, leave its column, and release the memory."""
        self._bytes[self._left_at(self.index)] = 1
        # Waits for gloo's threads, which write to the memory.
        self._column = None
        self._memory.close()


class Posted:
    """A reduction in progress. ``own``: the numbers that this rank has written, None if it has written none."""

    __slots__ = ("_board", "_count", "_number", "_own")

    def __init__(self, board: Board, number: int, count: int, own: Sequence[float] | None = None) -> None:
        self._board, self._number, self._count, self._own = board, number, count, own

    def wait(self) -> Sequence[float]:
        """Wait until all slots are written; return the sums, added in the order of slots. Collective."""
        board, number, count, own = self._board, self._number, self._count, self._own
        rows: list[Sequence[float]] = []
        for index in range(board.columns):
            rows.append(own if own is not None and index == board.index else board.wait(index, number, count))
        return list(map(sum, zip(*rows, strict=True)))

    def is_completed(self) -> bool:
        """Whether all slots are written."""
        board, number, count = self._board, self._number, self._count
        return all(board.look(index, number, count) is not None for index in range(board.columns))


class PostedInColumn(Posted):
    """A reduction in progress on several nodes, which gloo sums over this rank's column first, into the vector."""

    __slots__ = ("_unwritten", "_work")

    def __init__(self, board: Board, number: int, vector: Tensor, work: Any) -> None:
        super().__init__(board, number, vector.numel())
        self._work = work
        self._unwritten = [vector]
        work.get_future().then(self._write_if_summed)

    def wait(self) -> Sequence[float]:
        """Wait for the column, then as on one node. Collective.

        Raises:
            RuntimeError: gloo lost the connection to a rank of the column.
        """
        self._work.wait()
        self._write()
        return super().wait()

    def is_completed(self) -> bool:
        """Whether the column is summed and all slots are written."""
        return bool(self._work.is_completed()) and super().is_completed()

    def _write_if_summed(self, future: Any) -> None:
        """Write the sum of the column, in the thread of gloo that has computed it; ``wait`` raises its error."""
        with contextlib.suppress(RuntimeError):
            future.value()
            self._write()

    def _write(self) -> None:
        """Write the slot, unless the other thread has done so or is about to: removing an item is atomic."""
        with contextlib.suppress(IndexError):
            self._board.write(self._number, self._unwritten.pop().tolist())
