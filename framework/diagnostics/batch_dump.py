"""Saves a batch for inspection: ``<name>.safetensors`` with its tensors, ``<name>.json`` with everything else.

Batches are written with the codec of checkpoints, so nothing is pickled. ``read_batch`` loads a saved batch. Tensors
that would make the file larger than 64 MiB are described in the JSON file but not saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..checkpoint.codec import decode, encode
from ..checkpoint.finite_check import is_finite
from ..checkpoint.manifest import JSON
from ..checkpoint.safetensors_io import CODES, size_of, write_tensor_file
from ..core.errors import ConfigurationError
from ..parallel.zero_backward import tensors_in
from ..system.atomic_files import new_file, write_text

LIMIT_BYTES = 64 << 20


def keep_batch(folder: Path, name: str, batch: Any, facts: Mapping[str, Any], limit_bytes: int = LIMIT_BYTES) -> Path:
    """Write a batch and facts about it; return the path of the JSON file. Existing files of this name are replaced.

    Args:
        folder: Directory of the files.
        name: Name of the files, without extension.
        batch: The batch: any nesting of containers with tensors.
        facts: Additional entries of the JSON file.
        limit_bytes: Maximum size of all saved tensors, in bytes.

    Raises:
        StorageError: The files cannot be written.
    """
    document, tensors = _encoded(batch)
    kept, left_out = _fitting(tensors, limit_bytes)
    path = folder / f"{name}.json"
    found = {
        **facts,
        "batch": document,
        "tensors": {key: _described(tensor) for key, tensor in tensors.items()},
        "left_out": left_out,
    }
    with new_file(path.with_suffix(".safetensors")) as draft:
        specs = [(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in kept.items()]
        write_tensor_file(draft, specs, kept.__getitem__)
    write_text(path, json.dumps(found, indent=2, default=str) + "\n")
    return path


def read_batch(path: str | Path) -> Any:
    """Load a batch that ``keep_batch`` wrote, given the path of its JSON file. Its tensors are on the CPU.

    Raises:
        CheckpointError: Tensors were not saved because of their size, or the files have another format.
    """
    from safetensors.torch import load_file

    path = Path(path)
    document = json.loads(path.read_text(encoding="utf-8"))["batch"]
    return decode(document, load_file(path.with_suffix(".safetensors")))


def _encoded(batch: Any) -> tuple[JSON, dict[str, Tensor]]:
    """Encode a batch; if it contains types that the codec does not support, encode a list of its tensors instead."""
    try:
        return encode(batch)
    except ConfigurationError:
        return encode(list(tensors_in(batch)))


def _fitting(tensors: Mapping[str, Tensor], limit_bytes: int) -> tuple[dict[str, Tensor], list[str]]:
    kept: dict[str, Tensor] = {}
    left_out: list[str] = []
    room = limit_bytes
    for key, tensor in tensors.items():
        size = size_of(tensor.shape, tensor.dtype)
        if size > room or tensor.dtype not in CODES or tensor.is_sparse:
            left_out.append(key)
            continue
        room -= size
        kept[key] = tensor.detach()
    return kept, left_out


def _described(tensor: Tensor) -> dict[str, Any]:
    finite = None if tensor.is_sparse else is_finite(tensor.detach())
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch."), "finite": finite}
