"""The CUDA device of a rank: which one it is, and making it current without opening any other.

Opening a device takes about half a gigabyte of its memory, and fails on a device in exclusive use. A thread starts with
device 0 as its current one, so each thread that calls CUDA first makes the device of its rank current.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ..core.errors import ConfigurationError
from ..system.environment import sets_threads, threads_for_ranks, usable_cores
from ..system.launcher_env import Placement

# The devices that the user listed for the ranks of a node, while a strategy connects.
_listed: list[Sequence[int]] = []


def num_devices() -> int:
    """Return how many CUDA devices this process sees.

    Where NVML answers, CUDA is not started, so that ranks can still be forked from this process.
    """
    return torch.cuda.device_count()


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
        ConfigurationError: there are fewer CUDA devices than ranks on the node.
    """
    if device_type != "cuda":
        return torch.device(device_type)
    if indices is not None:
        return torch.device("cuda", indices[place.local_rank])
    visible = num_devices()
    index = 0 if is_assigned_one_device(place, visible) else place.local_rank
    if index >= visible:
        raise ConfigurationError(
            f"Local rank {place.local_rank} has no CUDA device: this process sees {visible} for {place.local_size} "
            "ranks on the node. Start fewer ranks, or check CUDA_VISIBLE_DEVICES."
        )
    return torch.device("cuda", index)


def take_device(device_type: str, place: Placement) -> torch.device:
    """Return the device of a rank, the current CUDA device from now on.

    Raises:
        ConfigurationError: there are fewer CUDA devices than ranks on the node.
    """
    device = device_of(device_type, place, _listed[-1] if _listed else None)
    make_current(device)
    return device


def make_current(device: torch.device) -> None:
    """Make a CUDA device the current one of this thread; do nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def empty_caches() -> None:
    """Collect garbage, and release the memory that torch caches on CUDA devices in use."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def share_cores(place: Placement) -> None:
    """Limit this rank to its share of the cores, unless the user or the launcher set the number of threads."""
    bound = usable_cores() < (os.cpu_count() or 1)
    if place.launcher in ("slurm", "mpi") and not bound and not sets_threads():
        torch.set_num_threads(threads_for_ranks(place.local_size))
