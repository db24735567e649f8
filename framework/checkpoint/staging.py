"""Asynchronous saves: the memory that state is copied to, and the thread that writes the copy while training continues.

The memory is reused for the next save. The first access to new pages costs ten times as much as the copy, so
``reserve`` does it in advance on a thread. Training does not wait for all copies either: optimizer state changes only
in ``step``, so it is copied during the computation of the next batch. From a GPU it is copied on a separate stream, and
the device waits for it before the next ``step``; all other copies are queued before later work. The host waits for none
of them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..core.errors import ConfigurationError, StorageError
from ..core.torch_internals import version_of
from ..distributed.devices import make_current
from .host_memory import allocate_pinned
from .manifest import JSON
from .write_plan import CheckpointContents, Shard, memory_of


class Hold:
    """Blocks calls of ``step`` between ``begin`` and ``release``; at other times a call only checks a flag."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        # By ``id``; the optimizer is referenced so that its id is not reused.
        self._held: dict[int, tuple[Optimizer, RemovableHandle]] = {}
        self._copied: torch.cuda.Event | None = None

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

    def wait_on_device(self, copied: torch.cuda.Event) -> None:
        """Make the stream of the next update wait for an event."""
        self._copied = copied

    def _wait(self, *_: Any) -> None:
        if not self._free.is_set():
            self._free.wait()
        if self._copied is not None:
            self._copied.wait()
            self._copied = None

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
    """Host memory that the contents of checkpoints are copied to, one at a time; pinned if they are on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._reserving: threading.Thread | None = None
        self._hold = Hold()
        self._later: list[tuple[Tensor, Tensor, int]] = []
        """Pending copies: the destination, the source, and the version of the source."""
        self._copied: list[torch.cuda.Event] = []
        self._stream: torch.cuda.Stream | None = None

    def reserve(self, size: int) -> None:
        """Allocate memory for about ``size`` bytes, on a thread."""
        if self._reserving is None and size > len(self._memory):
            self._reserving = threading.Thread(target=self._reserve, args=(size,), daemon=True, name="phalanx-reserve")
            self._reserving.start()

    def _reserve(self, size: int) -> None:
        try:
            # A new thread would open device 0.
            make_current(self._device)
            memory = allocate_pinned(size, self._device)
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
    def take(
        self, contents: CheckpointContents, optimizers: Sequence[Optimizer | None] = (None,)
    ) -> CheckpointContents:
        """Return a copy that is valid until the next one is taken; ``finish`` completes it.

        State that only ``step`` of ``optimizers`` changes, which is most of the data, is copied by ``finish``; ``step``
        waits for that. If one of the optimizers is ``None``, everything is copied here.

        Raises:
            ConfigurationError: a document is not strict JSON.
        """
        self.wait()
        documents = _frozen(contents.document), _frozen(contents.rank_document)
        pieces = [
            (section, name, shard, memory_of(shard, f"{section}/{name}"))
            for section, shards in contents.sections.items()
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
            self._memory = allocate_pinned(size, self._device)
        held = self._hold.begin(optimizers)
        if self._device.type == "cuda":
            self._begin_on_device()
        copied: dict[tuple[Any, ...], Tensor] = {}
        sections: dict[str, dict[str, Shard]] = {section: {} for section in contents.sections}
        for section, name, shard, key in pieces:
            if key not in copied:
                copied[key] = self._copy(shard.tensor.detach(), places[key], held and section == _OPTIMIZER)
            sections[section][name] = Shard(copied[key], shard.shape, shard.offsets)
        if self._stream is not None:
            self._end_on_device(self._stream)
        return CheckpointContents(sections, *documents, set(contents.buffers), contents.left_out)

    def finish(self) -> None:
        """Make the copies that ``take`` deferred, on any thread, and unblock waiting updates.

        Raises:
            StorageError: optimizer state was changed outside of an update.
        """
        later, self._later = self._later, []
        try:
            for copy, tensor, _ in later:
                copy.copy_(tensor)
            if any(version_of(tensor) != version for _, tensor, version in later):
                raise StorageError(
                    "An optimizer's state was changed outside of its step while it was copied: save with "
                    "asynchronous=False."
                )
        finally:
            self._hold.release()
        for event in self._copied:
            event.synchronize()

    def close(self) -> None:
        """Release the optimizers; copies that ``finish`` has not made are dropped."""
        self.wait()
        self._hold.close()

    def _copy(self, tensor: Tensor, place: int, later: bool) -> Tensor:
        size = tensor.numel() * tensor.element_size()
        copy = self._memory[place : place + size].view(tensor.dtype).view(tensor.shape)
        if later and tensor.device.type == "cpu" and not tensor.is_inference():
            self._later.append((copy, tensor, version_of(tensor)))
            return copy
        if later and self._stream is not None and tensor.is_cuda:
            with torch.cuda.stream(self._stream):
                copy.copy_(tensor, non_blocking=True)
            # In case the optimizer replaces it before the copy is done.
            tensor.record_stream(self._stream)
            return copy
        # The events of CUDA say when it has arrived; a copy of another device is waited for here.
        return copy.copy_(tensor, non_blocking=tensor.is_cuda)

    def _begin_on_device(self) -> None:
        """Make copies on the separate stream follow the updates that are queued now."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def _end_on_device(self, stream: torch.cuda.Stream) -> None:
        """Record when the copies on both streams are complete."""
        self._copied = []
        for each in (torch.cuda.current_stream(self._device), stream):
            # Waiting for it sleeps; by default it would occupy a core.
            event = torch.cuda.Event(blocking=True)
            event.record(each)
            self._copied.append(event)
        # The next update is queued behind the copies; ``finish`` waits for them.
        self._hold.wait_on_device(self._copied[1])


def _frozen(document: JSON) -> JSON:
    """Return a copy of a document; faster than ``deepcopy`` by ten times."""
    try:
        return json.loads(json.dumps(document, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"a document is not strict JSON ({error}); pass it through codec.encode.") from error


class SaveThread:
    """A daemon thread that runs ``work`` at once. An exception is not raised there but stored in ``error``.

    Args:
        work: the task.
        device: the device of this rank, which the task may use.
        over: called on that thread at the end.
    """

    def __init__(self, work: Callable[[], None], device: torch.device, over: Callable[[], None] = lambda: None) -> None:
        self.error: BaseException | None = None
        self._device = device
        self._given_up = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(work, over), daemon=True, name="phalanx-save")
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the task has ended, at most ``seconds``; return whether it has."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """Ask the task to end soon, as its result is no longer awaited."""
        self._given_up.set()

    @property
    def given_up(self) -> bool:
        """Whether ``give_up`` was called."""
        return self._given_up.is_set()

    def _run(self, work: Callable[[], None], over: Callable[[], None]) -> None:
        try:
            # A new thread would open device 0.
            make_current(self._device)
            work()
        except BaseException as error:
            self.error = error
        finally:
            over()
