"""The device of a rank: which one it is, and making it current without opening any other.

Opening a CUDA device takes about half a gigabyte of its memory, and fails on a device in exclusive use. A thread starts
with device 0 as its current one, so each thread that calls CUDA first makes the device of its rank current.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..core.accelerators import num_devices
from ..core.errors import ConfigurationError
from ..system.environment import sets_threads, threads_for_ranks, usable_cores
from ..system.launcher_env import Placement

# The devices that the user listed for the ranks of a node, while a strategy connects.
_listed: list[Sequence[int]] = []
# The device of this process, if that is an accelerator other than CUDA.
_taken: list[torch.device] = []
_HOW_TO_SEE = {"cuda": ", or check CUDA_VISIBLE_DEVICES", "xpu": ", or check ZE_AFFINITY_MASK"}


def shown_type(device_type: str) -> str:
    """Return the name of a type of devices in messages: "CUDA" for ``"cuda"``."""
    return device_type.upper()


def is_assigned_one_device(place: Placement, visible: int) -> bool:
    """Whether a scheduler shows each task its own device only, which then is device 0 in every task."""
    return visible == 1 and place.launcher in ("slurm", "mpi")


@contextmanager
def listed_devices(indices: Sequence[int] | None) -> Iterator[None]:
    """Context in which the ranks of a node take the devices of a list, by local rank; None for all visible ones."""
    if indices is None:
        yield
        return
    _listed.append(indices)
    try:
        yield
    finally:
        _listed.pop()


def device_of(device_type: str, place: Placement, indices: Sequence[int] | None = None) -> torch.device:
    """Return the device of a rank without opening it.

    Raises:
        ConfigurationError: there are fewer devices than ranks on the node.
    """
    if device_type == "cpu":
        return torch.device(device_type)
    if indices is not None:
        return torch.device(device_type, indices[place.local_rank])
    visible = num_devices(device_type)
    index = 0 if is_assigned_one_device(place, visible) else place.local_rank
    if index >= visible:
        raise ConfigurationError(
            f"Local rank {place.local_rank} has no {shown_type(device_type)} device: this process sees {visible} for "
            f"{place.local_size} ranks on the node. Start fewer ranks{_HOW_TO_SEE.get(device_type, '')}."
        )
    return torch.device(device_type, index)


def take_device(device_type: str, place: Placement) -> torch.device:
    """Return the device of a rank, the current one from now on.

    Raises:
        ConfigurationError: there are fewer devices than ranks on the node.
    """
    device = device_of(device_type, place, _listed[-1] if _listed else None)
    make_current(device)
    return device


def make_current(device: torch.device) -> None:
    """Make a device the current one of this thread; do nothing for the CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type not in ("cpu", "meta"):
        if device.index is not None:
            torch.accelerator.set_device_index(device.index)
        _taken[:] = [torch.device(device.type, torch.accelerator.current_device_index())]


def taken_device() -> torch.device | None:
    """Return the device that is in use, whose random numbers a run draws; None without one, or before it was taken."""
    if torch.cuda.is_initialized():
        return torch.device("cuda", torch.cuda.current_device())
    return _taken[0] if _taken else None


def empty_caches() -> None:
    """Collect garbage, and release the memory that torch caches on devices in use."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    elif _taken:
        with contextlib.suppress(RuntimeError):  # a backend without a caching allocator
            torch.accelerator.empty_cache()


def copies_in_order(device: torch.device) -> bool:
    """Whether asynchronous copies to and from memory that is not pinned are safe: not on MPS.

    CUDA copies such memory before the call returns, or in the order of its stream.
    """
    return device.type != "mps"


def share_cores(place: Placement) -> None:
    """Limit this rank to its share of the cores, unless the user or the launcher set the number of threads."""
    bound = usable_cores() < (os.cpu_count() or 1)
    if place.launcher in ("slurm", "mpi") and not bound and not sets_threads():
        torch.set_num_threads(threads_for_ranks(place.local_size))
