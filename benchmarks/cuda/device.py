"""The device: its timer, its memory and its speed, how often the host waits for it, and how long it is idle."""

from __future__ import annotations

import json
import platform
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Event = Mapping[str, Any]
_ROUNDS, _REPEATS = 5, 20
_WAIT = "called a synchronizing CUDA operation"
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_ON_HOST = {"cuda_runtime", "cuda_driver"}
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync")
_WAITS = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
    *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"),
)


class Device:
    """The first CUDA device, or the CPU."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_cuda = kind == "cuda"
        self.torch = torch.device("cuda", 0) if self.is_cuda else torch.device("cpu")
        self._events: list[Any] = []
        self._began = 0.0
        if self.is_cuda:
            torch.cuda.set_device(self.torch)
        # Emulated devices have no time, and a torch without CUDA.
        if self.is_cuda and torch.version.cuda is not None:
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch)

    def free_cache(self) -> None:
        """Return unused memory to the device, for the processes of other sides."""
        if self.is_cuda:
            torch.cuda.empty_cache()

    def start(self) -> None:
        """Begin to measure time and the peak of memory, with nothing left for the device to do."""
        self.synchronize()
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch)
        self._began = time.perf_counter()
        if self._events:
            self._events[0].record()

    def stop(self) -> float:
        """Return the seconds since ``start``, by the events of the device; without a GPU, by the host's clock."""
        if self._events:
            self._events[1].record()
        self.synchronize()
        wall = time.perf_counter() - self._began
        return self._events[0].elapsed_time(self._events[1]) / 1000 if self._events else wall

    def peak_bytes(self) -> int | None:
        """Return the largest memory that tensors have had at one time; None on a CPU."""
        return torch.cuda.max_memory_allocated(self.torch) if self.is_cuda else None

    @contextmanager
    def waits(self) -> Iterator[list[str]]:
        """Collect a line for each operation that makes the host wait, as far as torch's debug mode sees them.

        Builds of torch without CUDA have no such mode.
        """
        found: list[str] = []
        if not (self.is_cuda and hasattr(torch._C, "_cuda_set_sync_debug_mode")):
            yield found
            return
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found += [f"{each.filename}:{each.lineno}" for each in caught if _WAIT in str(each.message)]

    @contextmanager
    def traced(self, path: Path) -> Iterator[None]:
        """Write a trace of the device's kernels and of the calls of CUDA's runtime to a file, where there are any.

        Operations of the CPU are left out, since recording them makes the host slower.
        """
        if not (self.is_cuda and ProfilerActivity.CUDA in torch.profiler.supported_activities()):
            yield
            return
        # The first use in a process loads the library of the profiler, which takes about a second.
        with profile(activities=[ProfilerActivity.CUDA]):
            torch.zeros(1, device=self.torch)
            self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            yield
            self.synchronize()
        profiler.export_chrome_trace(str(path))

    def describe(self, tiny: bool) -> dict[str, Any]:
        """Return the names and versions of the machine, and its operations and bytes per second."""
        found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
        if self.is_cuda:
            found |= {"name": torch.cuda.get_device_properties(self.torch).name, "cuda": torch.version.cuda}
        size, count = (64, 1 << 16) if tiny else (8192, 1 << 30)
        left, right = (torch.randn(size, size, device=self.torch).to(torch.bfloat16) for _ in range(2))
        product = torch.empty_like(left)
        found["matmul_flops"] = 2 * size**3 / self._best(lambda: torch.mm(left, right, out=product))
        source = torch.empty(count, dtype=torch.uint8, device=self.torch)
        target = torch.empty_like(source)
        # It reads and writes each byte.
        found["copy_bytes"] = 2 * count / self._best(lambda: target.copy_(source))
        if self.is_cuda:
            pageable = torch.zeros(count // 4, dtype=torch.uint8)
            pinned, part = pageable.pin_memory(), target[: count // 4]
            found["pinned_bytes"] = len(part) / self._best(lambda: part.copy_(pinned, non_blocking=True))
            found["pageable_bytes"] = len(part) / self._best(lambda: part.copy_(pageable, non_blocking=True))
        return found

    def _best(self, function: Callable[[], object]) -> float:
        """Return the seconds of a call in the fastest round, the first of which warms up."""
        found = []
        for _ in range(_ROUNDS):
            self.start()
            for _ in range(_REPEATS):
                function()
            found.append(self.stop() / _REPEATS)
        return min(found)


# ---- the profiler's trace --------------------------------------------------------------------------------------------


def read(path: Path) -> list[Event]:
    """Return the events of a trace that have a duration; times are in microseconds."""
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def summary(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Return the contents of a trace of some steps, counts for each step.

    Waits before the first launch and after the last one are left out: they are those of the profiler.
    """
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    on_host = [event for event in events if event.get("cat") in _ON_HOST]
    launches = [event["ts"] for event in on_host if event["name"].startswith(_LAUNCHES)]
    first, last = min(launches, default=0), max(launches, default=0)
    # The version of a call is in the end of its name: cudaMemcpy_v3020.
    waits = Counter(
        event["name"] for event in on_host if event["name"].split("_v")[0] in _WAITS and first < event["ts"] < last
    )
    taken: Counter[str] = Counter()
    for event in on_device:
        taken[event["name"][:80]] += event["dur"]
    return {
        "idle_share": idle_share((event["ts"], event["ts"] + event["dur"]) for event in on_device),
        "kernels": sum(event["cat"] == "kernel" for event in on_device) / steps,
        "waits": {name: count / steps for name, count in waits.items()},
        "pageable_copies": sum("Pageable" in event["name"] for event in on_device) / steps,
        "longest_kernels": [(name, duration / 1000 / steps) for name, duration in taken.most_common(5)],
    }


def idle_share(intervals: Iterable[tuple[float, float]]) -> float | None:
    """Return the share of the time from the first begin to the last end in which no interval is open.

    None if there is no such time.
    """
    ordered = sorted(intervals)
    if not ordered:
        return None
    first = reached = ordered[0][0]
    idle = 0.0
    for begin, end in ordered:
        idle += max(0.0, begin - reached)
        reached = max(reached, end)
    return idle / (reached - first) if reached > first else None
