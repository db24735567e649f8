"""``LiveMemory``: the bytes of tensors on the CPU, counted at every operation of torch."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_QUIET = 0.1
"""Seconds without a change after which gloo's threads are assumed to hold no tensor of a collective that returned."""
_LARGE = 1 << 16


class LiveMemory(TorchDispatchMode):
    """Counts the memory of tensors that operations return in this context, until ``stop``.

    The numbers do not depend on the allocator of the C library, which keeps freed memory. A storage counts once, with
    the size that it has after each operation: FSDP resizes those of gathered parameters.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, tuple[int, weakref.ref[Any]]] = {}
        """A serial number for each storage, by its address, which others get when it is freed."""
        self._sizes: dict[int, int] = {}
        self._changes: list[tuple[int, int]] = []
        """The serial number of a storage, and the bytes by which it has grown or shrunk; in order."""
        self._numbers = 0
        self._start = 0
        self._is_on = True
        self._messages: list[weakref.ref[Any]] = []
        """Storages that were first seen in a collective, such as the bytes of an object: no operation has made them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        if self._is_on:
            for each in tree_leaves(returned):
                if isinstance(each, Tensor):
                    self._add(each._local_tensor if isinstance(each, DTensor) else each, func.namespace == "c10d")
            self._update()
        return returned

    def stop(self) -> None:
        """Count no more. What is held now is ``kept``.

        A collective returns before the thread of gloo that ran it has released its tensors, for which it needs the
        interpreter's lock, so this waits until nothing has been released for some time.
        """
        self._is_on = False
        seen = -1
        while seen != len(self._changes):
            seen = len(self._changes)
            time.sleep(_QUIET)
            self._update()

    def begin(self) -> None:
        """Look for the peak from here on."""
        self._update()
        self._start = len(self._changes)

    @property
    def peak(self) -> int:
        """The most bytes at one time."""
        return max(list(accumulate((change for _, change in self._changes), initial=0))[self._start :])

    @property
    def kept(self) -> int:
        """The bytes that are held at the end."""
        return sum(self._sizes.values())

    @property
    def passing(self) -> int:
        """The most bytes at one time of tensors that are freed before the end."""
        return _highest(change for number, change in self._changes if not self._sizes.get(number))

    def _add(self, tensor: Tensor, is_message: bool) -> None:
        if tensor.device.type != "cpu" or type(tensor) not in (Tensor, torch.nn.Parameter):
            return
        storage = tensor.untyped_storage()
        known = self._storages.get(storage._cdata)
        if known is None or known[1]() is None:
            if is_message:
                self._messages.append(weakref.ref(storage))
            elif storage.nbytes() >= _LARGE:
                self._await_release()
                known = self._storages.get(storage._cdata)
            if known is not None:
                self._resize(known[0], 0)
            self._numbers += 1
            self._storages[storage._cdata] = (self._numbers, weakref.ref(storage))

    def _await_release(self) -> None:
        """Wait until gloo's threads have released messages, which would count beside the next tensor by chance."""
        until = time.monotonic() + _QUIET
        while any(each() is not None for each in self._messages) and time.monotonic() < until:
            time.sleep(0.001)
        self._messages.clear()
        self._update()

    def _update(self) -> None:
        for address, (number, reference) in list(self._storages.items()):
            storage = reference()
            if storage is None:
                del self._storages[address]
            self._resize(number, 0 if storage is None else storage.nbytes())

    def _resize(self, number: int, size: int) -> None:
        change = size - self._sizes.get(number, 0)
        if change:
            self._sizes[number] = size
            self._changes.append((number, change))


def _highest(changes: Iterable[int]) -> int:
    return max(accumulate(changes), default=0)
