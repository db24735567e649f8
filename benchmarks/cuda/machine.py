"""The process that measures the machine: the peak of matrix products, and the speed of copies."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from typing import Any

import torch

from .channel import Parent
from .device import Device, Timer

_ROUNDS, _REPEATS = 5, 20


def main() -> None:
    parent = Parent()
    given = json.loads(sys.argv[1])
    device = Device(given["device"])
    parent.send({"machine": describe(device) | speeds(device, given["tiny"])})


def describe(device: Device) -> dict[str, Any]:
    """Return the names and versions of the parts of a machine."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "device": device.kind}
    if device.is_cuda:
        properties = torch.cuda.get_device_properties(device.torch)
        free, total = torch.cuda.mem_get_info(device.torch)
        found |= {
            "name": properties.name,
            "cuda": torch.version.cuda,
            "capability": f"{properties.major}.{properties.minor}",
            "free_bytes": free,
            "total_bytes": total,
        }
    return found


def speeds(device: Device, tiny: bool) -> dict[str, float]:
    """Return operations and bytes per second, the best of some rounds."""
    size, count = (64, 1 << 16) if tiny else (8192, 1 << 30)
    left, right = (torch.randn(size, size, device=device.torch).to(torch.bfloat16) for _ in range(2))
    product = torch.empty_like(left)
    found = {"matmul_flops": 2 * size**3 / _best(device, lambda: torch.mm(left, right, out=product))}
    source = torch.empty(count, dtype=torch.uint8, device=device.torch)
    target = torch.empty_like(source)
    # It reads and writes each byte.
    found["copy_bytes"] = 2 * count / _best(device, lambda: target.copy_(source))
    if device.is_cuda:
        pageable = torch.zeros(count // 4, dtype=torch.uint8)
        pinned = pageable.pin_memory()
        part = target[: count // 4]
        found["pinned_bytes"] = len(part) / _best(device, lambda: part.copy_(pinned, non_blocking=True))
        found["pageable_bytes"] = len(part) / _best(device, lambda: part.copy_(pageable, non_blocking=True))
    return found


def _best(device: Device, function: Callable[[], object]) -> float:
    """Return the seconds of a call in the fastest round, the first of which warms up."""
    timer = Timer(device)
    found = []
    for _ in range(_ROUNDS):
        timer.start()
        for _ in range(_REPEATS):
            function()
        found.append(timer.stop() / _REPEATS)
    return min(found)


if __name__ == "__main__":
    main()
