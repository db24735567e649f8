"""``Board``: sums of a few numbers, and of tensors, over the ranks of one node, through shared memory.

A reduction on gloo wakes a thread in every rank, which takes the core from the rank's own work: 1 ms of a step of 60
ms, where there are as many ranks as cores. Here each rank writes its numbers into its own slot, and reads the slots of
the others when it needs the sum: without a thread, and without a system call unless a rank is late.

With several nodes, what a rank writes is the sum over its column, which is a group of ranks of all nodes: see
``node_board.py``. gloo computes that sum in the background, and its thread writes the slot.

Reductions are numbered, identically on all ranks. A rank has at most ``_DEPTH / 4`` of them open at a time, so every
rank has read a slot before it is reused. A slot that was reused too early is detected by its number and never summed.

``TensorSums`` adds CPU tensors, such as the gradients of ``ddp``, in the same way. Two ranks on two cores add 4 KiB in
45 us, and gloo in 420 us; four ranks on two cores in 150 us, and gloo in 6 ms.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.errors import DesyncError, LostRankError, RankError
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
TENSOR_BYTES = 1 << 25
"""Shared memory for the tensors of all ranks of a node. Pages that no tensor has filled take no memory."""
# Ranks write into two parts in turn.
_TURNS = 2
_CONTENT_AND_NUMBER, _NUMBER = struct.Struct("<QQ"), struct.Struct("<Q")
_ALIGNMENT, _KINDS_KEPT = 64, 256
# Other processors may show a rank's number to other ranks before its tensor, and a checksum takes as long as the sum.
_KEEPS_ORDER = platform.machine() in ("x86_64", "AMD64")

T = TypeVar("T")


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
        try:
            if place is None:
                os.ftruncate(file, size)
            self.bytes = mmap.mmap(file, size)
        except BaseException:
            os.close(file)
            raise

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
        self.tensors = TensorSums(self, self._bytes) if column is None and _KEEPS_ORDER else None
        """Sums of tensors; None on several nodes."""

    @staticmethod
    def size(ranks: int) -> int:
        """Return the size in bytes of a board for ``ranks`` ranks, including a token that identifies it.

        The slots are followed by one byte per rank, which is set once the rank has left, and by the tensors.
        """
        return Board.tensors_at(ranks) + TENSOR_BYTES + TOKEN_BYTES

    @staticmethod
    def tensors_at(ranks: int) -> int:
        """Return where the tensors of ``ranks`` ranks begin."""
        return -(-ranks * (_DEPTH * _SLOT_BYTES + 1) // _ALIGNMENT) * _ALIGNMENT

    @property
    def num_ranks(self) -> int:
        """The number of ranks of this node."""
        return len(self._node.ranks)

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
        if found > number:
            raise self.desync(index, f"is at control reduction {found},", f"at {number}")
        payload = self._bytes[start + _HEAD.size : start + _HEAD.size + 8 * min(length, CAPACITY)]
        if checksum != zlib.crc32(payload, number & _LOW):
            return None
        if length != count:
            raise self.desync(index, f"reduces {length} numbers where", f"reduces {count}")
        numbers: tuple[float, ...] = _NUMBERS[length].unpack(payload)
        return numbers

    def wait(self, index: int, number: int, count: int) -> tuple[float, ...]:
        """Wait for the numbers in a slot for a reduction, and return them. Raises as ``wait_for``."""
        found = self.look(index, number, count)
        return self.wait_for(index, lambda: self.look(index, number, count)) if found is None else found

    def wait_for(self, index: int, look: Callable[[], T | None]) -> T:
        """Call ``look`` until it returns what a rank has written, and return it.

        Raises:
            RankError: the rank has left, its process is gone, or it has not written for half an hour.
        """
        looks, since, asked = 0, 0.0, 0.0
        while (found := look()) is None:
            looks += 1
            if looks < _EAGER_LOOKS:
                os.sched_yield()
                continue
            # The rank may have written after the last poll, before it left.
            if self._bytes[self._left_at(index)] and look() is None:
                raise self._lost(index, "has left")
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
            raise self._lost(index, "is gone")
        if waited > _LIMIT_SECONDS:
            beyond = ", or a rank of another node has kept both" if self._column is not None else ""
            raise RankError(
                f"{self._title(index)} has kept rank {self._own_rank} waiting for {waited:.0f} s{beyond}: look at "
                f"what it does with py-spy dump --pid {pid}."
            )

    def desync(self, index: int, theirs: str, own: str) -> DesyncError:
        """Return the error for a rank that does something else than this rank."""
        return DesyncError(
            f"rank {self._node.ranks[index]} {theirs} this rank {self._own_rank} {own}: every rank must run the same "
            "loop, and reduce tensors of the same shape and dtype. Look for a condition on the rank around a step, a "
            "fit or an all_reduce."
        )

    def _lost(self, index: int, how: str) -> LostRankError:
        text = f"{self._title(index)} {how}, and rank {self._own_rank} waits for it."
        return LostRankError(text, self._node.ranks[index])

    def _title(self, index: int) -> str:
        return f"rank {self._node.ranks[index]} (pid {self._node.pids[index]})"

    @property
    def _own_rank(self) -> int:
        return self._node.ranks[self.index]

    def _left_at(self, index: int) -> int:
        return len(self._node.ranks) * _DEPTH * _SLOT_BYTES + index

    def close(self) -> None:
        """Mark this rank as having left, leave its column, and release the memory. No effect in a forked process."""
        if os.getpid() != self._node.pids[self.index]:
            # A child that ends runs the exit handlers of its parent, which is still there.
            return
        self._bytes[self._left_at(self.index)] = 1
        # Waits for gloo's threads, which write to the memory.
        self._column = self.tensors = None
        # A tensor of a sum that an exception has interrupted still refers to the memory, and frees it later.
        with contextlib.suppress(BufferError):
            self._memory.close()


class TensorSums:
    """Sums of CPU tensors over the ranks of one node.

    Each rank writes its tensor into its part of the memory, and adds those of all ranks in the order of ranks. Before a
    rank writes, it has read the sum before. So all ranks have written that one, and have read the one before it, whose
    part is free.
    """

    def __init__(self, board: Board, memory: mmap.mmap) -> None:
        self._board, self._memory = board, memory
        self._start = Board.tensors_at(board.num_ranks)
        self._stride = TENSOR_BYTES // (board.num_ranks * _TURNS) // _ALIGNMENT * _ALIGNMENT
        self.most_bytes = self._stride - _ALIGNMENT
        """The largest tensor in bytes."""
        self._number = 0
        # By turn, dtype and number of elements: buckets of gradients have the same in each step.
        self._rows: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}

    def add(self, tensor: Tensor, factor: float = 1.0) -> None:
        """Replace a tensor by the sum over the ranks of ``factor`` times it. Collective.

        Raises:
            DesyncError: a rank adds a tensor of another size or dtype.
            RankError: a rank has left, or its process is gone.
        """
        self._number = number = self._number + 1
        turn, content, own = number % _TURNS, _DTYPE_CODES[tensor.dtype] | tensor.nbytes, self._board.index
        # The tensor may have been made in inference mode, and the sum be used outside of it.
        with torch.inference_mode():
            # A copy of a tensor that is not contiguous, which may be so on some ranks only.
            flat = tensor.reshape(-1)
            rows = self._rows.get((turn, tensor.dtype, len(flat))) or self._parts(turn, tensor.dtype, len(flat))
            if factor == 1.0:
                rows[own].copy_(flat)
            else:
                torch.mul(flat, factor, out=rows[own])
            _CONTENT_AND_NUMBER.pack_into(self._memory, self._head(own, turn), content, number)
            for index in range(len(rows)):
                if index != own and not self._is_written(index, turn, number, content):
                    self._board.wait_for(index, partial(self._is_written, index, turn, number, content))
            torch.add(rows[0], rows[1], out=flat)
            for row in rows[2:]:
                flat.add_(row)
            if not tensor.is_contiguous():
                tensor.copy_(flat.view(tensor.shape))

    def _head(self, index: int, turn: int) -> int:
        return self._start + (index * _TURNS + turn) * self._stride

    def _parts(self, turn: int, dtype: torch.dtype, count: int) -> list[Tensor]:
        """Return the parts of all ranks as tensors, and keep them for the next sum of this kind."""
        begins = [self._head(index, turn) + _ALIGNMENT for index in range(self._board.num_ranks)]
        rows = [
            torch.frombuffer(self._memory, dtype=dtype, count=count, offset=begin)
            if count
            else torch.empty(0, dtype=dtype)
            for begin in begins
        ]
        if len(self._rows) == _KINDS_KEPT:
            self._rows.clear()
        self._rows[turn, dtype, count] = rows
        return rows

    def _is_written(self, index: int, turn: int, number: int, content: int) -> bool | None:
        """Return True if a rank has written its part, else None."""
        head = self._head(index, turn)
        # The number is read alone, before the content: it is written last.
        (found,) = _NUMBER.unpack_from(self._memory, head + _NUMBER.size)
        if found < number:
            return None
        (other,) = _NUMBER.unpack_from(self._memory, head)
        if (found, other) != (number, content):
            theirs, own = f"adds {_described(other)} in sum {found},", f"{_described(content)} in sum {number}"
            raise self._board.desync(index, theirs, own)
        return True


_DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
_DTYPE_BITS = 48
# Above the number of bytes: two dtypes with equal numbers of bytes would add up to numbers without a meaning.
_DTYPE_CODES = {dtype: code << _DTYPE_BITS for code, dtype in enumerate(_DTYPES)}


def _described(content: int) -> str:
    return f"{content & (1 << _DTYPE_BITS) - 1} bytes of {_DTYPES[content >> _DTYPE_BITS]}"


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
