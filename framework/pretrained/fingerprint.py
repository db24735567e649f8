"""``fingerprint``: a hash by which the weights in a folder are recognized."""

from __future__ import annotations

import os
from typing import Any

from ..checkpoint.safetensors_header import CHUNK_BYTES
from ..core.errors import CheckpointError
from .file_tensor import TensorFile
from .weight_folder import Weights, open_weights


def fingerprint(path: str | os.PathLike[str], contents: bool = True) -> str:
    """Return a hash of the weights in a Hugging Face folder, a ``.safetensors`` file or a checkpoint.

    Equal files have equal fingerprints, whatever the folder is called and whatever else it holds.

    Args:
        path: the folder, file or checkpoint.
        contents: hash every byte. If False, only the names, the sizes and the headers of the files: that takes
            milliseconds, and does not notice other values in the same tensors.

    Returns:
        ``"xxh3-128:"`` or ``"xxh3-128-headers:"``, and 32 hex digits.

    Raises:
        CheckpointError: there are no weights that can be read.
    """
    return fingerprint_of(open_weights(path), contents)


def fingerprint_of(weights: Weights, contents: bool = True) -> str:
    """Return the fingerprint of weights that are open."""
    from xxhash import xxh3_128

    digest = xxh3_128()
    if weights.checkpoint is not None:
        # The manifest has the checksum of every file.
        digest.update(weights.checkpoint.manifest.checksum.encode())
    for file in sorted(weights.files, key=lambda file: file.path.name):
        # A single file is known by its contents: users rename it.
        name = file.path.name if len(weights.files) > 1 else ""
        digest.update(f"{name}\0{file.size}\0".encode())
        digest.update(file.header)
        if contents:
            _add_contents(digest, file)
    return f"xxh3-128{'' if contents else '-headers'}:{digest.hexdigest()}"


def _add_contents(digest: Any, file: TensorFile) -> None:
    memory, opened = memoryview(bytearray(CHUNK_BYTES)), file.open()
    if opened.size != file.size:
        raise CheckpointError(f"{str(file.path)!r} was replaced while it was read: load it again.")
    for start in range(len(file.header), file.size, CHUNK_BYTES):
        chunk = memory[: min(CHUNK_BYTES, file.size - start)]
        opened.read_into(chunk, start)
        digest.update(chunk)
