"""Disk offload of stage 3: its folder, and buffers that grow with the model."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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


@contextlib.contextmanager
def growing_buffers() -> Iterator[None]:
    """Let the buffers for parameters on a disk grow to the largest parameter that is built inside.

    DeepSpeed allocates the buffers, locked in memory, before the first parameter exists, from a size in the config. A
    guess would either waste memory or fail on a larger layer. While a model is being built one parameter at a time is
    split, so all buffers are free before the next one, and can be replaced.
    """
    # Checked with DeepSpeed 0.19.8: get_buffer is the only place where a parameter is compared with the buffers.
    from deepspeed.runtime.swap_tensor.partitioned_param_swapper import AsyncPartitionedParameterSwapper as Swapper

    original = Swapper.get_buffer

    def get_buffer(swapper: Any, parameter: Any, elements: int) -> Tensor:
        # A parameter in a buffer would lose its data: then DeepSpeed's own error about the size is the right answer.
        if elements > swapper.elements_per_buffer and not swapper.param_id_to_buffer_id:
            _grow(swapper, elements)
        buffer: Tensor = original(swapper, parameter, elements)
        return buffer

    Swapper.get_buffer = get_buffer
    try:
        yield
    finally:
        Swapper.get_buffer = original


def _grow(swapper: Any, elements: int) -> None:
    """Replace a swapper's buffers by larger ones, as its constructor makes them in DeepSpeed 0.19.8."""
    # Writes in flight read from the old buffers.
    swapper.synchronize_writes()
    swapper.aio_read_handle.free_cpu_locked_tensor(swapper.buffers)
    swapper.elements_per_buffer = elements
    swapper.aligned_elements_per_buffer = swapper._io_aligned_numel(elements)
    count = swapper.aligned_elements_per_buffer * swapper.param_buffer_count
    swapper.buffers = swapper.aio_read_handle.new_cpu_locked_tensor(count, torch.empty(0, dtype=swapper.dtype))
