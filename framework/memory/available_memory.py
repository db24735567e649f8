"""The memory that is available to a rank: on its device, on the host, on a disk.

Host memory is the minimum of what several limits leave: the limits of the process's control group and of its ancestors
(v2 or v1), the process's own limits (``RLIMIT_AS``, ``RLIMIT_DATA``), and the memory that the system has available. All
but the process's own limits are shared by the ranks of a node.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..core import accelerators

# Above the memory of any machine. cgroup v1 reports a number of this size where there is no limit.
_NO_LIMIT = 1 << 60
# Host memory that the libraries of strategies take at their first use: 50 to 180 MB were measured.
_LIBRARIES = 180_000_000
# Device memory: workspaces of cuBLAS and cuDNN with loaded kernels, and buffers of NCCL. Not measured by phalanx.
_CUDA_LIBRARIES = 500_000_000
_NCCL = 1_000_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes that are available to one rank. On a CPU ``device`` and ``host`` are the same memory."""

    device: int
    host: int
    disk: int = 0
    """This rank's share of the free space of the disk at ``nvme_path``; 0 without one."""
    device_is_host: bool = True

    def least(self, others: Iterable[Memory]) -> Memory:
        """Return the minimum of each kind over this rank and others."""
        ranks = [self, *others]
        device, host, disk = (min(getattr(rank, name) for rank in ranks) for name in ("device", "host", "disk"))
        return Memory(device, host, disk, self.device_is_host)


def available_memory(
    device: torch.device, sharing: int, nvme_path: str | os.PathLike[str] | None, held: int = 0
) -> Memory:
    """Return the memory that is available to one rank.

    Args:
        device: the rank's device. No other is opened.
        sharing: the number of ranks on this node, which share its memory.
        held: bytes of host memory that the model takes in this process already, which count as available to it.
    """
    host = max(0, host_memory(sharing) + held - _LIBRARIES)
    disk = disk_free(nvme_path) // sharing if nvme_path is not None else 0
    # On a CPU, and on a device that shares its memory, they are the same.
    if (free := accelerators.available_memory(device)) is None:
        return Memory(host, host, disk)
    return Memory(max(0, free - gpu_libraries(sharing)), host, disk, device_is_host=False)


def gpu_libraries(sharing: int) -> int:
    """Return device memory that CUDA's libraries take at their first use, and NCCL if there are several ranks."""
    return _CUDA_LIBRARIES + (_NCCL if sharing > 1 else 0)


def host_memory(sharing: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of host memory that this process can still take.

    Args:
        sharing: the number of processes that share the machine.
        proc: the directory at which ``proc`` is mounted.
        cgroups: the directory at which the control groups are mounted.
    """
    shared = [*_control_groups(proc, cgroups), *_available(proc)]
    own = list(_own_limits(proc))
    return max(0, min([min(shared, default=_NO_LIMIT) // sharing, *own]))


def disk_free(path: str | os.PathLike[str]) -> int:
    """Return the free bytes of the disk of a folder, which need not exist yet."""
    folder = Path(path).expanduser().absolute()
    existing = next(each for each in (folder, *folder.parents) if each.exists())
    return shutil.disk_usage(existing).free


def bytes_of(tensors: Iterable[Tensor], device_type: str = "cpu") -> int:
    """Return the bytes of the storages of tensors on one type of device. Shared storages count once."""
    storages = {
        storage.data_ptr(): storage.nbytes()
        for tensor in tensors
        if tensor.device.type == device_type
        for storage in [tensor.untyped_storage()]
    }
    return sum(storages.values())


def _available(proc: Path) -> Iterator[int]:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
            return
    with contextlib.suppress(ValueError, OSError):
        # Without this file: all memory of the machine, in use or not.
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _own_limits(proc: Path) -> Iterator[int]:
    """Yield the bytes that this process's limits on its address space and its private memory leave."""
    used = {line.split()[0]: int(line.split()[1]) * 1024 for line in _lines(proc / "self/status") if line[:2] == "Vm"}
    for limit, counted in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield soft - used.get(counted, 0)


def _control_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield the bytes that the memory limits of this process's control group and of its ancestors leave."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _limits(cgroups / "memory", path, *names)


def _limits(root: Path, path: str, limit_name: str, usage_name: str, cache: str) -> Iterator[int]:
    folder = root / path.lstrip("/")
    # Inside a container the path may be the host's, which does not exist here; the root is then this group itself.
    for each in (folder, *folder.parents) if folder.is_dir() else (root,):
        limit, usage = _number(each / limit_name), _number(each / usage_name)
        if limit is not None and limit < _NO_LIMIT and usage is not None:
            # The kernel reclaims the page cache before it refuses memory.
            reclaimable = next((int(line.split()[1]) for line in _lines(each / "memory.stat") if cache in line), 0)
            yield limit - usage + reclaimable
        if each == root:
            return


def _number(file: Path) -> int | None:
    text = "".join(_lines(file))
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
