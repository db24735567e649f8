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
    # Checked with DeepSpeed 0.19.8: `zero.Init` creates its swapper by this name, and get_buffer is the only place
    # where a parameter is compared with the buffers.
    from deepspeed.runtime.zero import partition_parameters

    original = partition_parameters.AsyncPartitionedParameterSwapper

    class GrowingSwapper(original):  # type: ignore[misc, valid-type]
        elements_per_buffer: int
        buffers: Tensor

        def get_buffer(self, parameter: Any, elements: int) -> Tensor:
            # A parameter in a buffer would lose its data: then DeepSpeed's own error about the size is the right
            # answer.
            if elements > self.elements_per_buffer and not self.param_id_to_buffer_id:
                self._grow(elements)
            buffer: Tensor = super().get_buffer(parameter, elements)
            return buffer

        def _grow(self, elements: int) -> None:
            """Replace the buffers by larger ones, as the constructor makes them."""
            # Writes in flight read from the old buffers.
            self.synchronize_writes()
            self.aio_read_handle.free_cpu_locked_tensor(self.buffers)
            self.elements_per_buffer = elements
            self.aligned_elements_per_buffer = self._io_aligned_numel(elements)
            count = self.aligned_elements_per_buffer * self.param_buffer_count
            self.buffers = self.aio_read_handle.new_cpu_locked_tensor(count, torch.empty(0, dtype=self.dtype))

    partition_parameters.AsyncPartitionedParameterSwapper = GrowingSwapper
    try:
        yield
    finally:
        partition_parameters.AsyncPartitionedParameterSwapper = original
