"""Reads a trace of torch's profiler: the idle share of the device, its waits and copies, and its longest kernels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_ON_HOST = {"cuda_runtime", "cuda_driver"}
_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cuStreamSynchronize")

Event = Mapping[str, Any]


def read(path: Path) -> list[Event]:
    """Return the events of a trace that have a duration; times are in microseconds."""
    events: list[Event] = json.loads(path.read_text())["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def summary(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Return what a trace of some steps contains, counts for each step.

    The wait that ends the trace itself is not counted.
    """
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    waits = Counter(
        event["name"] for event in events if event.get("cat") in _ON_HOST and str(event["name"]).startswith(_WAITS)
    )
    waits["cudaDeviceSynchronize"] -= 1
    return {
        "idle_share": idle_share((event["ts"], event["ts"] + event["dur"]) for event in on_device),
        "kernels": sum(event["cat"] == "kernel" for event in on_device) / steps,
        "waits": {name: count / steps for name, count in waits.items() if count > 0},
        "pageable_copies": sum("Pageable" in event["name"] for event in on_device) / steps,
        "longest_kernels": longest(on_device, steps),
    }


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
