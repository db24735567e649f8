"""Pinned host memory, and ``HostPieces``: tensors in host memory, piece by piece, to write them to a file.

A GPU copies to pinned memory on its own, while the host works. So two pinned buffers are used in turn: the device fills
one of them while the host hashes and writes the content of the other. Small tensors share a buffer. The host waits once
for each buffer: how often depends on the size of the state, not on the number of its tensors.

Pinned memory has exactly the requested size. torch's own allocator rounds each size up to a power of two, and keeps
what was freed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class _Pages(mmap.mmap):
    """Memory of this process; if it was pinned, it is unpinned before it is returned to the system."""

    _pinned_by: int | None = None

    def pin(self, address: int, device: torch.device) -> bool:
        """Pin the pages, so that the device copies to them on its own; return whether that succeeded."""
        with torch.cuda.device(device):
            pinned = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0)) == 0
        if pinned:
            self._pinned_by, self._address, self._device = os.getpid(), address, device
        return pinned

    def __del__(self) -> None:
        # A forked process has a copy of this object, and no pinned pages.
        if self._pinned_by is not None and self._pinned_by == os.getpid():
            self._pinned_by = None
            # At the end of the process CUDA may be gone.
            with contextlib.suppress(Exception), torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._address)


def allocate_pinned(size: int, device: torch.device) -> Tensor:
    """Return ``size`` bytes of host memory, uint8; pinned if ``device`` is a GPU and the system allows it.

    They are unpinned and returned to the system once no tensor refers to them.

    Raises:
        OSError: there is not enough memory.
    """
    pages = _Pages(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda" and not pages.pin(memory.data_ptr(), device):
        # Copies to memory that is not pinned are slower and block, with the same result. A failed cudaHostRegister
        # leaves its error set, and the next kernel launch would raise it: launch one here, and ignore the error.
        with contextlib.suppress(Exception):
            torch.zeros(1, device=device).add_(1)
    return memory


BUFFER_BYTES = 32 << 20
_LEAST_BYTES = 1 << 16
# At least the size of any element, and one cache line.
_ALIGNMENT = 64
Piece = tuple[str, Tensor]
_Copies = tuple[list[Piece], torch.cuda.Event]


class HostPieces:
    """Copies tensors to the host. The buffers are allocated for the first tensor on a GPU, and kept for later calls.

    Args:
        expected_bytes: the size of all tensors; where it is small, so are the buffers.
    """

    def __init__(self, expected_bytes: int) -> None:
        self._capacity = min(max(expected_bytes, _LEAST_BYTES), BUFFER_BYTES)
        self._buffers: deque[Tensor] = deque()

    def __call__(self, tensors: Iterable[Piece]) -> Iterator[Piece]:
        """Yield the elements of each named tensor, in order, as contiguous 1-d tensors in host memory.

        A tensor on a GPU may be divided into several pieces, each of which is valid until the next one is requested. A
        tensor in host memory is one piece, for which the next tensor was not read yet.
        """
        pending: deque[_Copies] = deque()
        for pieces in self._shares(tensors):
            if pieces[0][1].is_cuda:
                pending.append(self._copy(pieces))
            while pending and (len(pending) == 2 or not pieces[0][1].is_cuda):
                yield from _arrived(*pending.popleft())
            if not pieces[0][1].is_cuda:
                yield from pieces
        for copies in pending:
            yield from _arrived(*copies)

    def _shares(self, tensors: Iterable[Piece]) -> Iterator[list[Piece]]:
        """Yield lists of pieces: of tensors on a GPU as many as a buffer holds, of others a single one."""
        share: list[Piece] = []
        size = 0
        for name, tensor in tensors:
            flat = (_contiguous(tensor) if tensor.is_cuda else dense(tensor)).reshape(-1)
            if not flat.is_cuda:
                if share:
                    yield share
                share, size = [], 0
                yield [(name, flat)]
                continue
            start, item = 0, flat.element_size()
            # Once for an empty tensor.
            while start < len(flat) or start == 0:
                if self._capacity - size < item:
                    yield share
                    share, size = [], 0
                count = min(len(flat) - start, (self._capacity - size) // item)
                share.append((name, flat[start : start + count]))
                size += _aligned(count * item)
                if not count:
                    break
                start += count
        if share:
            yield share

    def _copy(self, pieces: list[Piece]) -> _Copies:
        """Start to copy the pieces to the buffer that was filled before the last one."""
        device = pieces[0][1].device
        if len(self._buffers) < 2:
            self._buffers.append(allocate_pinned(self._capacity, device))
        else:
            self._buffers.rotate(1)
        buffer, place, copies = self._buffers[-1], 0, []
        for name, piece in pieces:
            size = len(piece) * piece.element_size()
            copies.append((name, buffer[place : place + size].view(piece.dtype).copy_(piece, non_blocking=True)))
            place += _aligned(size)
        # Waiting for it sleeps; by default it would occupy a core.
        copied = torch.cuda.Event(blocking=True)
        copied.record(torch.cuda.current_stream(device))
        return copies, copied


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor as contiguous CPU memory, without a copy if it already is."""
    return _contiguous(tensor.detach().cpu())


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _arrived(pieces: list[Piece], copied: torch.cuda.Event) -> Iterator[Piece]:
    copied.synchronize()
    yield from pieces


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
