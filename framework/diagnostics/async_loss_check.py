"""Checks losses for NaN and Inf without making the host wait for the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

_SLOTS = 16


class DeviceLossWatch:
    """Copies each loss to pinned memory in the background and reports those that are non-finite.

    A loss is checked once its copy is complete, usually one or two steps later, and at the latest when the ring buffer
    of copies is full.
    """

    def __init__(self, report: Callable[[float, int], None], look: Callable[[float, int, int], None]) -> None:
        """Store the callbacks.

        ``report`` receives non-finite losses and their step, ``look`` all others with their step and position.
        """
        self._report = report
        self._look = look
        self._ring = torch.zeros(_SLOTS, dtype=torch.float32, pin_memory=True)
        self._events = [torch.cuda.Event() for _ in range(_SLOTS)]
        self._waiting: deque[tuple[int, int, int]] = deque()
        self._next = 0

    def __call__(self, loss: Tensor, step: int, position: int) -> None:
        """Start the copy of the loss of a step and of the batch at ``position`` in the epoch; check complete copies."""
        self._collect(wait=len(self._waiting) == _SLOTS)
        slot = self._next
        self._next = (slot + 1) % _SLOTS
        self._ring[slot : slot + 1].copy_(loss.detach().reshape(1), non_blocking=True)
        self._events[slot].record()
        self._waiting.append((slot, step, position))

    def flush(self) -> None:
        """Wait for all pending copies and check them."""
        while self._waiting:
            self._collect(wait=True)

    def _collect(self, wait: bool) -> None:
        while self._waiting:
            slot, step, position = self._waiting[0]
            if wait:
                self._events[slot].synchronize()
                wait = False
            elif not self._events[slot].query():
                return
            self._waiting.popleft()
            number = float(self._ring[slot])
            if number - number != 0.0:
                self._report(number, step)
            else:
                self._look(number, step, position)
