"""A batch kept for inspection: ``<name>.safetensors`` with its tensors, ``<name>.json`` with everything else.

It is written by the codec of checkpoints, so nothing is pickled, and ``read_batch`` gives the batch back. What would
make it larger than 64 MiB is described and left out.
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
    """Write a batch and what is known of it; return the path of its JSON. One of the same name is replaced.

    Raises:
        StorageError: it cannot be written.
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
    """Return a batch that ``keep_batch`` wrote, given the path of its JSON. Its tensors are on the CPU.

    Raises:
        CheckpointError: tensors of it were left out for their size, or the files are not such ones.
    """
    from safetensors.torch import load_file

    path = Path(path)
    document = json.loads(path.read_text(encoding="utf-8"))["batch"]
    return decode(document, load_file(path.with_suffix(".safetensors")))


def _encoded(batch: Any) -> tuple[JSON, dict[str, Tensor]]:
    """Return a batch in its own form, or as a list of its tensors where it holds what the codec does not know."""
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
