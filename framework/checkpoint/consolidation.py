"""The model's weights of a checkpoint as plain safetensors, for programs that know nothing of phalanx."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from math import ceil
from pathlib import Path

from ..atomic import (
    hidden_sibling,
    make_directory,
    new_file,
    remove_tree,
    replace_directory,
    storage_error,
    write_synced,
)
from ..errors import ConfigurationError
from .read import Checkpoint, open_checkpoint
from .tensors import size_of, write_tensor_file
from .write import MODEL

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def consolidate(
    path: str | os.PathLike[str], out: str | os.PathLike[str], max_shard_size: int | str | None = None
) -> Path:
    """Write the model's weights as plain safetensors, for programs that know nothing of phalanx; one tensor at a time.

    Without ``max_shard_size``, ``out`` is a file (or a directory, which gets ``model.safetensors``). With it (bytes, or
    ``"5GB"``), ``out`` is a new directory of ``model-00001-of-00002.safetensors`` and an index, as Hugging Face writes
    them. Tied tensors are written under each of their names. Returns the file, or the directory.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
        ConfigurationError: ``out`` exists, or ``max_shard_size`` is no size.
        StorageError: ``out`` cannot be written.
    """
    limit = None if max_shard_size is None else _size(max_shard_size)
    checkpoint, target = open_checkpoint(path), Path(out)
    names = checkpoint.names(MODEL)
    if limit is not None:
        return _write_shards(checkpoint, target, _groups(checkpoint, names, limit))
    if target.is_dir():
        target = target / "model.safetensors"
    if target.exists():
        raise ConfigurationError(f"out={str(target)!r} exists; choose another name or remove it first.")
    with new_file(target, sum(_bytes(checkpoint, name) for name in names)) as temporary:
        _write_weights(checkpoint, temporary, names)
    return target


def _write_weights(checkpoint: Checkpoint, path: Path, names: Iterable[str]) -> None:
    specs = [(name, checkpoint.dtype(MODEL, name), checkpoint.shape(MODEL, name)) for name in names]
    write_tensor_file(path, specs, lambda name: checkpoint.read(MODEL, name))


def _write_shards(checkpoint: Checkpoint, target: Path, groups: list[list[str]]) -> Path:
    if os.path.lexists(target):
        raise ConfigurationError(f"out={str(target)!r} exists; with max_shard_size it is made as a new directory.")
    temporary = hidden_sibling(target, "tmp")
    files = {f"model-{number:05d}-of-{len(groups):05d}.safetensors": names for number, names in enumerate(groups, 1)}
    total = sum(_bytes(checkpoint, name) for names in groups for name in names)
    homes = {name: file for file, names in files.items() for name in names}
    try:
        make_directory(temporary)
        for file, names in files.items():
            _write_weights(checkpoint, temporary / file, names)
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": homes}, indent=2)
        write_synced(temporary / "model.safetensors.index.json", index.encode("utf-8"))
        replace_directory(temporary, target)
    except BaseException as error:
        if temporary.is_dir():
            remove_tree(temporary)
        if isinstance(error, OSError):
            raise storage_error("writing", target, error, total) from error
        raise
    return target


def _groups(checkpoint: Checkpoint, names: list[str], limit: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    held = 0
    for name in names:
        size = _bytes(checkpoint, name)
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def _bytes(checkpoint: Checkpoint, name: str) -> int:
    return size_of(checkpoint.shape(MODEL, name), checkpoint.dtype(MODEL, name))


def _size(given: int | str) -> int:
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", str(given))
    unit = _UNITS.get(match[2].upper()) if match is not None else None
    if match is None or unit is None or float(match[1]) * unit < 1:
        raise ConfigurationError(f"max_shard_size={given!r} is no size; give bytes, or a string such as '5GB'.")
    return ceil(float(match[1]) * unit)
