"""Staging memory for snapshots, so that training can continue while a copy is written.

The memory is reused for the next snapshot. The first access to new pages costs ten times as much as the copy, so
``reserve`` does it in advance on a thread. Training does not wait for all copies either: optimizer state changes only
in ``step``, so it is copied during the computation of the next batch. From a GPU, all copies are queued before later
work, and training waits for none of them.
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
from torch.utils.hooks import RemovableHandle

from ..core.errors import ConfigurationError, StorageError
from .manifest import JSON
from .write_plan import Shard, Snapshot, memory_of


class Hold:
    """Blocks calls of ``step`` between ``begin`` and ``release``; at other times a call only checks a flag."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        # By ``id``; the optimizer is referenced so that its id is not reused.
        self._held: dict[int, tuple[Optimizer, RemovableHandle]] = {}

    def begin(self, optimizers: Sequence[Optimizer | None]) -> bool:
        """Start to block updates, if possible; return whether it is possible.

        It is not possible if a strategy does not know the optimizer that steps (None), or if a class has replaced
        torch's wrapper around ``step``.
        """
        known = [one for one in optimizers if one is not None and getattr(type(one).step, "hooked", False)]
        if len(known) != len(optimizers):
            return False
        for one in known:
            if id(one) not in self._held:
                self._held[id(one)] = one, one.register_step_pre_hook(self._wait)
        self._free.clear()
        return True

    def _wait(self, *_: Any) -> None:
        if not self._free.is_set():
            self._free.wait()

    def release(self) -> None:
        """Unblock waiting updates."""
        self._free.set()

    def close(self) -> None:
        """Remove all hooks from the optimizers."""
        self.release()
        for _, handle in self._held.values():
            handle.remove()
        self._held.clear()


# At least the size of any element, and one cache line.
_ALIGNMENT = 64
_OPTIMIZER = "optimizer"


class Staging:
    """Host memory that snapshots are copied to, one at a time; pinned if they are copied from a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._reserving: threading.Thread | None = None
        self._hold = Hold()
        self._later: list[tuple[Tensor, Tensor, int]] = []
        """Pending copies: the destination, the source, and the version of the source."""
        self._copied: torch.cuda.Event | None = None

    def reserve(self, size: int) -> None:
        """Allocate memory for snapshots of about ``size`` bytes, on a thread."""
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
        """Wait for the allocation that ``reserve`` started."""
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None

    # A save may run during an evaluation, and tensors created in inference mode cannot be written to later.
    @torch.inference_mode(False)
    def take(self, snapshot: Snapshot, optimizers: Sequence[Optimizer | None] = (None,)) -> Snapshot:
        """Return a copy of a snapshot that is valid until the next one is taken; ``finish`` completes it.

        State that only ``step`` of ``optimizers`` changes, which is most of the data, is copied by ``finish``; ``step``
        waits for that. If one of the optimizers is ``None``, everything is copied here.

        Raises:
            ConfigurationError: a document is not strict JSON.
        """
        self.wait()
        documents = _frozen(snapshot.document), _frozen(snapshot.rank_document)
        pieces = [
            (section, name, shard, memory_of(shard, f"{section}/{name}"))
            for section, shards in snapshot.sections.items()
            for name, shard in shards.items()
        ]
        places: dict[tuple[Any, ...], int] = {}
        size = 0
        for _, _, shard, key in pieces:
            if key not in places:
                places[key] = size
                size += -(-shard.tensor.numel() * shard.tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        if size > len(self._memory):
            # Free the old memory first: both may not fit.
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = self._allocate(size)
        held = self._hold.begin(optimizers)
        copied: dict[tuple[Any, ...], Tensor] = {}
        sections: dict[str, dict[str, Shard]] = {section: {} for section in snapshot.sections}
        for section, name, shard, key in pieces:
            if key not in copied:
                copied[key] = self._copy(shard.tensor.detach(), places[key], held and section == _OPTIMIZER)
            sections[section][name] = Shard(copied[key], shard.shape, shard.offsets)
        if self._device.type == "cuda":
            # Wait once for all copies before they are read: the next update is queued behind them on the device.
            self._copied = torch.cuda.Event()
            self._copied.record()
        return Snapshot(sections, *documents, set(snapshot.buffers))

    def finish(self) -> None:
        """Make the copies that ``take`` deferred, on any thread, and unblock waiting updates.

        Raises:
            StorageError: optimizer state was changed outside of an update.
        """
        later, self._later = self._later, []
        try:
            for copy, tensor, _ in later:
                copy.copy_(tensor)
            if any(tensor._version != version for _, tensor, version in later):
                raise StorageError(
                    "An optimizer's state was changed outside of its step while it was copied: save with "
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
