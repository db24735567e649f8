"""Disk offload of stage 3: the checks of its folder."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from ...framework.core.errors import ConfigurationError


def check_swap_folder(path: Path) -> None:
    """Refuse a folder that DeepSpeed cannot swap to.

    A file is created and opened as DeepSpeed opens its own: with direct writes, which bypass the page cache. Permission
    bits and mount options do not tell reliably whether that succeeds.

    Raises:
        ConfigurationError: the folder is not writable, or its file system does not support direct writes.
    """
    existing = next(each for each in (path, *path.parents) if each.exists())
    try:
        handle, name = tempfile.mkstemp(dir=existing, prefix=".phalanx-")
    except OSError as error:
        raise ConfigurationError(
            f"nvme_path={str(path)!r} cannot be written: {error.strerror} ({str(existing)!r}). Choose a folder on "
            "a fast local disk that this user may write to."
        ) from None
    os.close(handle)
    try:
        os.close(os.open(name, os.O_WRONLY | getattr(os, "O_DIRECT", 0)))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise ConfigurationError(
            f"nvme_path={str(path)!r} is on a file system without direct writes (O_DIRECT), which DeepSpeed needs: "
            "choose a folder on a local disk, not on tmpfs or a network share."
        ) from None
    finally:
        os.unlink(name)


def is_in_memory(path: Path) -> bool:
    """Whether a folder is on a file system that is held in memory, so that offloading to it saves nothing."""
    import psutil

    real = path.resolve()
    mounts = {Path(each.mountpoint): each.fstype for each in psutil.disk_partitions(all=True)}
    kind = next((mounts[each] for each in (real, *real.parents) if each in mounts), "")
    return kind in ("tmpfs", "ramfs")
