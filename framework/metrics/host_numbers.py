"""Copies of logged numbers from their devices to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class HostNumbers:
    """Pairs of numbers, some of them tensors, that are being copied to the host.

    Values are stacked, one tensor for each device and dtype; from CUDA they are copied to pinned memory asynchronously,
    so that a later read need not wait.
    """

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._numbers: list[Any] = [number for pair in pairs for number in pair]
        self._copies: list[tuple[list[int], Tensor, Any]] = []
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, number in enumerate(self._numbers):
            if isinstance(number, Tensor):
                places.setdefault((number.device, number.dtype), []).append(place)
        for (device, _), group in places.items():
            stacked = torch.stack([self._numbers[place].reshape(()) for place in group])
            event = None
            if device.type == "cuda":
                stacked = stacked.to("cpu", non_blocking=True)
                event = torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True))
            self._copies.append((group, stacked, event))
            for place in group:
                self._numbers[place] = None

    def is_on_host(self) -> bool:
        """Whether ``read`` returns without waiting."""
        return all(event is not None and event.query() for _, _, event in self._copies)

    def read(self) -> list[tuple[float, float]]:
        """Return the pairs as numbers; waits for the device if needed."""
        for group, stacked, event in self._copies:
            if event is not None:
                event.synchronize()
            for place, number in zip(group, stacked.tolist(), strict=True):
                self._numbers[place] = float(number)
        return list(zip(self._numbers[::2], self._numbers[1::2], strict=True))


def read_numbers(values: Sequence[Any]) -> list[float | None]:
    """Return values as numbers, None where there is none; copies those on a device with one synchronization."""
    numbers = [value for value in values if value is not None]
    found = iter(HostNumbers([(number, 0.0) for number in numbers]).read())
    return [None if value is None else float(next(found)[0]) for value in values]
