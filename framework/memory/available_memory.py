"""How much memory there is for a rank: on its device, on the host, on a disk.

On a host the least of what several limits leave counts: the control group's (v2 or v1, those above it too), the
process's own (``RLIMIT_AS``, ``RLIMIT_DATA``), and what the system has available. All but the process's own are shared
by the ranks of a node.
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

# Some way above what any machine has: cgroup v1 writes such a number where there is no limit.
_NO_LIMIT = 1 << 60
# What strategies' libraries take of host memory when they are first used: measured, 50 to 180 MB.
_LIBRARIES = 180_000_000


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank can hold. On a CPU the device is the host: ``device`` and ``host`` are the same bytes."""

    device: int
    host: int
    disk: int = 0
    """Free on the disk at ``nvme_path``, its share; 0 without one."""
    device_is_host: bool = True

    def least(self, others: Iterable[Memory]) -> Memory:
        """Return the least of each over several ranks."""
        all_of = [self, *others]
        device, host, disk = (min(getattr(one, name) for one in all_of) for name in ("device", "host", "disk"))
        return Memory(device, host, disk, self.device_is_host)


def memory_there(device_type: str, sharing: int, nvme_path: str | os.PathLike[str] | None, held: int = 0) -> Memory:
    """Return what a rank of ``sharing`` ranks on this node can hold.

    ``held`` are bytes that the model takes already, in this process, in host memory: they stay the model's.
    """
    host = max(0, host_memory(sharing) + held - _LIBRARIES)
    disk = disk_free(nvme_path) // sharing if nvme_path is not None else 0
    if device_type != "cuda":
        return Memory(host, host, disk)
    free, _ = torch.cuda.mem_get_info()
    # What torch has taken from the device and not given out.
    spare = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return Memory(free + spare, host, disk, device_is_host=False)


def host_memory(sharing: int, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of host memory that this process, one of ``sharing`` on the machine, can still take."""
    shared = [*_control_groups(proc, cgroups), *_available(proc)]
    own = list(_own_limits(proc))
    return max(0, min([min(shared, default=_NO_LIMIT) // sharing, *own]))


def disk_free(path: str | os.PathLike[str]) -> int:
    """Return the free bytes of the disk on which a folder is, or will be."""
    there = Path(path).expanduser().absolute()
    standing = next(each for each in (there, *there.parents) if each.exists())
    return shutil.disk_usage(standing).free


def bytes_of(tensors: Iterable[Tensor], device_type: str = "cpu") -> int:
    """Return the bytes of the storages of tensors on a kind of device, each storage once."""
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
        # Where there is no such file: all there is, used or not.
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _own_limits(proc: Path) -> Iterator[int]:
    """Yield what the limits of this process leave: of its address space, and of its private memory."""
    used = {line.split()[0]: int(line.split()[1]) * 1024 for line in _lines(proc / "self/status") if line[:2] == "Vm"}
    for limit, counted in ((resource.RLIMIT_AS, "VmSize:"), (resource.RLIMIT_DATA, "VmData:")):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            yield soft - used.get(counted, 0)


def _control_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """Yield what the memory limits of this process's control group, and of those above it, leave."""
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _limits(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            yield from _limits(cgroups / "memory", path, *names)


def _limits(root: Path, path: str, limit_name: str, usage_name: str, cache: str) -> Iterator[int]:
    folder = root / path.lstrip("/")
    # Inside a container the path may be that of the host, and the root is this group itself.
    for each in (folder, *folder.parents) if folder.is_dir() else (root,):
        limit, usage = _number(each / limit_name), _number(each / usage_name)
        if limit is not None and limit < _NO_LIMIT and usage is not None:
            # The system takes back what files are cached in before it refuses.
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
