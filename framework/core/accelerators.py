"""The accelerator of this process: CUDA, ROCm, XPU, MPS or another device type of which torch has a backend.

CUDA is asked through ``torch.cuda`` where that does not start it, and everything else through ``torch.accelerator``. A
backend may lack a part of it, such as the counters of memory: the functions here return None then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

T = TypeVar("T")


def accelerator_type() -> str | None:
    """Return the type of the accelerator that torch sees, such as ``"cuda"``, ``"xpu"`` or ``"mps"``; None without one.

    Where NVML answers, CUDA is not started, so that ranks can still be forked from this process.
    """
    if torch.cuda.device_count():
        return "cuda"
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "cuda" else found.type


def num_devices(device_type: str) -> int:
    """Return how many devices of a type this process sees; 0 of ``"cpu"``."""
    if device_type == "cuda":
        return torch.cuda.device_count()
    return torch.accelerator.device_count() if device_type == accelerator_type() else 0


def has_own_memory(device: torch.device) -> bool:
    """Whether a device counts its memory apart from that of the host."""
    return device.type == "cuda" or used_memory(device) is not None


def used_memory(device: torch.device) -> int | None:
    """Return the bytes that torch's allocator has given to tensors on a device; None where it does not count them.

    The counters are the host's: nothing waits for the device.
    """
    return _asked(device, torch.accelerator.memory_allocated)


def peak_memory(device: torch.device) -> int | None:
    """Return the largest number of bytes that ``used_memory`` has returned; None where it is not counted."""
    return _asked(device, torch.accelerator.max_memory_allocated)


def available_memory(device: torch.device) -> int | None:
    """Return the bytes that tensors can still take on a device: free ones, and those that torch caches.

    None where the device does not say so, such as one that shares the memory of the host.
    """

    # Memory that torch's allocator has reserved and not given to a tensor.
    spare = _asked(
        device, lambda which: torch.accelerator.memory_reserved(which) - torch.accelerator.memory_allocated(which)
    )
    free = free_memory(device)
    return None if free is None or spare is None else free + spare


def free_memory(device: torch.device) -> int | None:
    """Return the bytes of a device that nothing has reserved; None where the device does not say so."""
    return _asked(device, lambda which: torch.accelerator.get_memory_info(which)[0])


def restart_peak(device: torch.device) -> None:
    """Wait for a device that counts its memory, and let the peak begin at the present use."""
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)


def _asked(device: torch.device, question: Callable[[torch.device], T]) -> T | None:
    if device.type == "cpu":
        return None
    if device.type == "cuda":
        # An error is CUDA's own.
        return question(device)
    try:
        return question(device)
    except (RuntimeError, ValueError):
        # NotImplementedError is a RuntimeError: the backend has no such allocator.
        return None
