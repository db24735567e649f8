"""Host memory for snapshots, of exactly the requested size; locked in place for copies from a GPU.

torch's own allocator of locked ("pinned") memory rounds each size up to a power of two, and keeps what was freed.
"""

from __future__ import annotations

import contextlib
import mmap
import os

import torch
from torch import Tensor


class _Pages(mmap.mmap):
    """Memory of this process; if it was locked, it is unlocked before it is returned to the system."""

    _locked_by: int | None = None

    def lock(self, address: int, device: torch.device) -> bool:
        """Lock the pages in place, so that the device copies to them on its own; return whether that succeeded."""
        with torch.cuda.device(device):
            locked = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0)) == 0
        if locked:
            self._locked_by, self._address, self._device = os.getpid(), address, device
        return locked

    def __del__(self) -> None:
        # A forked process has a copy of this object, and no locked pages.
        if self._locked_by is not None and self._locked_by == os.getpid():
            self._locked_by = None
            # At the end of the process CUDA may be gone.
            with contextlib.suppress(Exception), torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(self._address)


def allocate_staging(size: int, device: torch.device) -> Tensor:
    """Return ``size`` bytes, uint8; locked in place if the device is a GPU and the system allows it.

    They are unlocked and returned to the system once no tensor refers to them.

    Raises:
        OSError: there is not enough memory.
    """
    pages = _Pages(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda" and not pages.lock(memory.data_ptr(), device):
        # Copies to memory that is not locked are slower and block, with the same result. The next kernel would report
        # the error of the failed call: launch one now.
        with contextlib.suppress(Exception):
            torch.zeros(1, device=device).add_(1)
    return memory
