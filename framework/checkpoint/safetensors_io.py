"""Conversion of tensors to and from safetensors bytes; files are written, hashed and synced in one pass."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigurationError
from ..core.torch_versions import existing_dtypes
from ..system.atomic_files import begin_sync, reserve
from .host_memory import HostPieces
from .safetensors_header import CHUNK_BYTES, TORCH_NAMES, FileRecord, Segment, header_of

# Small enough that little is left for the final sync, large enough for long writes to the disk.
_SYNC_BYTES = 8 << 20


class StreamedFile:
    """A new file, which must not exist yet. Every method raises ``OSError`` if the operation fails.

    A checkpoint is valid only once it is synced. By default the page cache holds its bytes until that sync, which then
    waits for all of them. Here the kernel is asked after every few megabytes to start writing them, so the disk works
    while the next tensors are hashed, and the final sync is short. Direct writes (``O_DIRECT``) take two to three times
    as long on the file systems measured, since each waits for the previous one.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Create the file and reserve ``size`` bytes; more or less may be written."""
        self.path = path
        self.size = 0
        """The bytes written so far."""
        self._begun = 0
        self._file = path.open("xb", buffering=0)
        try:
            reserve(self._file.fileno(), size)
        except BaseException:
            self.close()
            raise

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        while len(data):
            # The kernel may write fewer bytes than requested.
            written = os.write(self._file.fileno(), data)
            self.size += written
            data = data[written:]
        if self.size - self._begun >= _SYNC_BYTES:
            begin_sync(self._file.fileno(), self._begun, self.size - self._begun)
            self._begun = self.size

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


# A torch that lacks one of them cannot hold such a tensor either.
_EXISTING = existing_dtypes(TORCH_NAMES.values())
DTYPES: dict[str, torch.dtype] = {code: _EXISTING[name] for code, name in TORCH_NAMES.items() if name in _EXISTING}
CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in DTYPES.items()}


def code_of(dtype: torch.dtype, name: str) -> str:
    """Return the format's code of a dtype.

    Raises:
        ConfigurationError: safetensors has none; the message names the tensor.
    """
    if dtype not in CODES:
        hint = " Save torch.view_as_real of it." if dtype.is_complex else " Convert it first."
        raise ConfigurationError(f"tensor {name!r} is {dtype}, which safetensors files cannot hold.{hint}")
    return CODES[dtype]


def size_of(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a dense tensor."""
    return prod(shape) * dtype.itemsize


def bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous CPU tensor's memory."""
    flat = tensor.detach().reshape(-1)
    memory: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(memory)


def write_tensor_file(
    path: Path,
    specs: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
    fetch: Callable[[str], Tensor],
    look: Callable[[str, Tensor], None] | None = None,
    unsynced: list[StreamedFile] | None = None,
    on_host: HostPieces | None = None,
) -> tuple[FileRecord, dict[str, Segment]]:
    """Create a file of the tensors in ``specs`` (name, dtype, shape) and sync it.

    ``fetch`` is called once for each name, in the file's order, so that only one tensor has to be in memory at a time.
    ``look`` is called with each 1-d piece of a tensor before it is written; if it raises, writing ends. Where
    ``unsynced`` is given, the file is left there, open, for the caller to sync and close. ``on_host`` copies tensors to
    the host; the same one may be used for several files.
    """
    from xxhash import xxh3_64

    specs = sorted(specs, key=lambda spec: -spec[1].itemsize)
    header, starts = header_of([(name, code_of(dtype, name), shape) for name, dtype, shape in specs])
    whole = xxh3_64(header)
    segments: dict[str, Segment] = {}
    total = sum(size_of(shape, dtype) for _, dtype, shape in specs)
    on_host = on_host or HostPieces(total)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, dtype, shape in specs:
            tensor = fetch(name)
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), name
            yield name, tensor

    with contextlib.ExitStack() as closing:
        file = StreamedFile(path, len(header) + total)
        closing.callback(file.close)
        file.write(memoryview(header))
        for name, pieces in groupby(on_host(tensors()), itemgetter(0)):
            begin, digest = file.size, xxh3_64()
            for _, flat in pieces:
                for piece in flat.split(CHUNK_BYTES // flat.element_size()):
                    chunk = bytes_of(piece)
                    if look is not None:
                        # All passes over a chunk find it in the processor's cache.
                        look(name, piece)
                    digest.update(chunk)
                    whole.update(chunk)
                    file.write(chunk)
            segments[name] = Segment(starts[name], file.size - begin, digest.hexdigest())
        if unsynced is None:
            file.sync()
        else:
            closing.pop_all()
            unsynced.append(file)
    return FileRecord(file.size, len(header), xxh3_64(header).hexdigest(), whole.hexdigest()), segments
