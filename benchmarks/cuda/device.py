"""The device of a side: its timer, its memory, its traces, and how often the host waits for it."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_WAIT = "called a synchronizing CUDA operation"


class Device:
    """The first CUDA device, or the CPU."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_cuda = kind == "cuda"
        self.torch = torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")
        if self.is_cuda:
            torch.cuda.set_device(self.torch)

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def free_cache(self) -> None:
        """Return unused memory to the device, for the processes of other sides."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        """Begin to measure the peak of memory."""
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch)

    def peak_bytes(self) -> int | None:
        """Return the largest memory that tensors have had at one time; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.torch) if self.is_cuda else None

    @contextmanager
    def waits(self) -> Iterator[list[str]]:
        """Collect a line for each operation that makes the host wait, as far as torch's debug mode sees them."""
        found: list[str] = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found += [f"{each.filename}:{each.lineno}" for each in caught if _WAIT in str(each.message)]

    @property
    def reports_waits(self) -> bool:
        """Whether torch has the debug mode: builds with CUDA do."""
        return self.is_cuda and hasattr(torch._C, "_cuda_set_sync_debug_mode")

    @property
    def has_profiler(self) -> bool:
        """Whether the profiler sees the device's kernels."""
        return self.is_cuda and ProfilerActivity.CUDA in torch.profiler.supported_activities()

    @contextmanager
    def traced(self, path: Path) -> Iterator[None]:
        """Write a trace of the device's kernels and of the calls of CUDA's runtime to a file.

        Operations of the CPU are left out, since recording them makes the host slower.
        """
        # The first use in a process loads the library of the profiler, which takes about a second.
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.zeros(1, device=self.torch)
            self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            yield
            self.synchronize()
        profiler.export_chrome_trace(str(path))


class Timer:
    """The time between two points in the device's work. It waits for the device at both of them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._events: list[Any] = []
        # Emulated devices have no time, and a torch without CUDA.
        if device.is_cuda and torch.version.cuda is not None:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._began = 0.0

    def start(self) -> None:
        """Begin, with nothing left for the device to do."""
        self._device.synchronize()
        self._began = time.perf_counter()
        if self._events:
            self._events[0].record()

    def stop(self) -> float:
        """Return the seconds since ``start``, by the events of the device; without a GPU, by the host's clock."""
        if self._events:
            self._events[1].record()
        self._device.synchronize()
        wall = time.perf_counter() - self._began
        return self._events[0].elapsed_time(self._events[1]) / 1000 if self._events else wall
