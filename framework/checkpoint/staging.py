"""A copy of a snapshot in its own memory, so that training can continue while it is written.

The memory is kept and used again for the next snapshot. What costs most is the first touch of fresh pages, ten times as
much as copying; ``reserve`` has that done ahead, on a thread. Nor does training wait for all copies: an optimizer's
state changes in its steps alone, so that is copied while the next batch is computed with. From a GPU all copies are
queued in front of whatever comes next, and training waits for none.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import ConfigurationError, StorageError
from .manifest import JSON
from .optimizer_gate import Hold
from .write_plan import Shard, Snapshot, memory_of

# More than any element, and a line of the processor's cache.
_ALIGNMENT = 64
_OPTIMIZER = "optimizer"


class Staging:
    """Host memory that snapshots are copied to, one at a time; pinned where they come from a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._reserving: threading.Thread | None = None
        self._hold = Hold()
        self._later: list[tuple[Tensor, Tensor, int]] = []
        """Copies to be made: where to, from what, and its version as it was."""
        self._copied: torch.cuda.Event | None = None

    def reserve(self, size: int) -> None:
        """Get ready for snapshots of about ``size`` bytes, on a thread."""
        if self._reserving is None and size > len(self._memory):
            self._reserving = threading.Thread(target=self._reserve, args=(size,), daemon=True, name="phalanx-reserve")
            self._reserving.start()

    def _reserve(self, size: int) -> None:
        try:
            memory = self._allocate(size)
            memory.zero_()
        except (MemoryError, OSError, RuntimeError):
            # The save that needs the memory will raise.
            return
        self._memory = memory

    def wait(self) -> None:
        """Wait for what ``reserve`` began."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    # A save may come out of an evaluation, and tensors made in inference mode could not be written to afterwards.
    @torch.inference_mode(False)
    def take(self, snapshot: Snapshot, optimizers: Sequence[Optimizer | None] = (None,)) -> Snapshot:
        """Return a copy of a snapshot that stays as it is, until the next one is taken; ``finish`` completes it.

        What a step of ``optimizers`` alone changes, and most of what is to be copied, is left to ``finish``, and they
        wait for it before they step. With a None among them everything is copied here.

        Raises:
            ConfigurationError: a document is not strict JSON.
        """
        self.wait()
        documents = _frozen(snapshot.document), _frozen(snapshot.rank_document)
        places: dict[tuple[Any, ...], int] = {}
        size = 0
        for section, shards in snapshot.sections.items():
            for name, shard in shards.items():
                key = memory_of(shard, f"{section}/{name}")
                if key not in places:
                    places[key] = size
                    size += -(-shard.tensor.numel() * shard.tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._memory):
            # What is held goes first: there may be no room for both.
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = self._allocate(size)
        held = self._hold.begin(optimizers)
        copied: dict[tuple[Any, ...], Tensor] = {}
        sections: dict[str, dict[str, Shard]] = {}
        for section, shards in snapshot.sections.items():
            sections[section] = {}
            for name, shard in shards.items():
                key = memory_of(shard, f"{section}/{name}")
                if key not in copied:
                    later = held and section == _OPTIMIZER
                    copied[key] = self._copy(shard.tensor.detach(), places[key], later)
                sections[section][name] = Shard(copied[key], shard.shape, shard.offsets)
        if self._device.type == "cuda":
            # One wait for all copies, before they are read: the next update is behind them in the device's queue.
            self._copied = torch.cuda.Event()
            self._copied.record()
        return Snapshot(sections, *documents, set(snapshot.buffers))

    def finish(self) -> None:
        """Copy what ``take`` left, on any thread, and release waiting updates.

        Raises:
            StorageError: what only an update changes was changed.
        """
        later, self._later = self._later, []
        try:
            for copy, tensor, _ in later:
                copy.copy_(tensor)
            if any(tensor._version != version for _, tensor, version in later):
                raise StorageError(
                    "An optimizer's state was changed by something else than its step while it was copied: save with "
                    "asynchronous=False."
                )
        finally:
            self._hold.release()
        if self._copied is not None:
            self._copied.synchronize()

    def close(self) -> None:
        """Release the optimizers; copies that ``finish`` has not made are dropped."""
        self.wait()
        self._hold.close()

    def _copy(self, tensor: Tensor, place: int, later: bool) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        copy = self._memory[place : place + size].view(tensor.dtype).view(tensor.shape)
        if later and tensor.device.type == "cpu" and not tensor.is_inference():
            self._later.append((copy, tensor, tensor._version))
            return copy
        return copy.copy_(tensor, non_blocking=True)

    def _allocate(self, size: int) -> Tensor:
        if self._device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, pin_memory=True)
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)


def _frozen(document: JSON) -> JSON:
    """Return a copy of a document; faster than ``deepcopy`` by ten times."""
    try:
        return json.loads(json.dumps(document, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"a document is not strict JSON ({error}); pass it through codec.encode.") from error
