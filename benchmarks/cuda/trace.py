"""Reads a trace of torch's profiler: the idle share of the device, its waits and copies, and its longest kernels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_ON_HOST = {"cuda_runtime", "cuda_driver"}
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync")
_WAITS = (
    *("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"),
    *("cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize"),
)

Event = Mapping[str, Any]


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
    waits = Counter(
        event["name"]
        for event in on_host
        if is_wait(event["name"]) and min(launches, default=0) < event["ts"] < max(launches, default=0)
    )
    return {
        "idle_share": idle_share((event["ts"], event["ts"] + event["dur"]) for event in on_device),
        "kernels": sum(event["cat"] == "kernel" for event in on_device) / steps,
        "waits": {name: count / steps for name, count in waits.items()},
        "pageable_copies": sum("Pageable" in event["name"] for event in on_device) / steps,
        "longest_kernels": longest(on_device, steps),
    }


def is_wait(call: str) -> bool:
    """Whether a call of CUDA's runtime or driver returns only when the device has reached a point."""
    # The version of a call is in the end of its name: cudaMemcpy_v3020.
    return call.split("_v")[0] in _WAITS


def idle_share(intervals: Iterable[tuple[float, float]]) -> float | None:
    """Return the share of the time from the first begin to the last end in which no interval is open.

    None if there is no such time.
    """
    ordered = sorted(intervals)
    if not ordered:
        return None
    first, reached = ordered[0][0], ordered[0][0]
    idle = 0.0
    for begin, end in ordered:
        idle += max(0.0, begin - reached)
        reached = max(reached, end)
    return idle / (reached - first) if reached > first else None


def longest(events: Iterable[Event], steps: int, count: int = 5) -> list[tuple[str, float]]:
    """Return the names with the most time on the device, with their milliseconds for each step."""
    total: Counter[str] = Counter()
    for event in events:
        total[event["name"][:80]] += event["dur"]
    return [(name, taken / 1000 / steps) for name, taken in total.most_common(count)]
