"""The store of checkpoints: atomic, verified, the same under every strategy. Nothing in it pickles or unpickles.

A checkpoint is a directory of safetensors files and a ``manifest.json``; the page "The checkpoint format" of the docs
describes every byte. Strategies write with ``save`` and read slices through ``open_checkpoint``; users have ``load``,
``weights``, ``verify`` and ``consolidate``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from math import ceil
from pathlib import Path
from typing import Any

from torch import Tensor

from . import codec
from .atomic import (
    clean_leftovers,
    hidden_sibling,
    make_directory,
    new_file,
    remove_tree,
    replace_directory,
    retire_directory,
    storage_error,
    write_synced,
)
from .checkpoint_plan import Shard, Snapshot
from .checkpoint_read import Checkpoint, open_checkpoint
from .checkpoint_verify import is_complete, verify
from .checkpoint_write import MODEL, Save, has_nonfinite, is_ours, save
from .errors import CheckpointError, ConfigurationError, StorageError
from .manifest import MANIFEST
from .tensor_file import size_of, write_tensor_file

__all__ = [
    "Checkpoint",
    "Save",
    "Shard",
    "Snapshot",
    "clean_leftovers",
    "consolidate",
    "has_nonfinite",
    "is_complete",
    "load",
    "newest_good",
    "open_checkpoint",
    "remove",
    "save",
    "verify",
    "weights",
]

STATE = "state"
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the model's tensors by name, on the CPU; tied names share one tensor.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    return open_checkpoint(path).read_section(MODEL)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint as one dict.

    ``"state_dict"`` holds the model's tensors, ``"optimizer_tensors"`` the optimizers' by parameter, and the other keys
    what else was saved, decoded.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    checkpoint = open_checkpoint(path)
    tensors = {section: checkpoint.read_section(section) for section in checkpoint.sections}
    document = codec.decode(checkpoint.document, tensors.pop(STATE, {}))
    found: dict[str, Any] = dict(document) if isinstance(document, dict) else {"document": document}
    found["state_dict"] = tensors.pop(MODEL, {})
    for section, content in tensors.items():
        found[f"{section}_tensors"] = content
    return found


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


def newest_good(
    directory: str | os.PathLike[str],
    note: Callable[[str], None],
    refuse: Callable[[Checkpoint], str | None] | None = None,
) -> Path | None:
    """Return the checkpoint in ``directory`` that got furthest and verifies, or None.

    "Furthest" is by the progress in the manifests (optimizer steps, then batches, then the time of saving), never by
    names or a pointer file. ``note`` is told why each better one was passed over: damaged, weights that are not finite,
    or what ``refuse`` answered for it. Links and unfinished saves are not looked at.
    """
    found: list[tuple[tuple[int, int, float], Path, Checkpoint]] = []
    for path in _candidates(Path(directory)):
        try:
            checkpoint = open_checkpoint(path)
        except CheckpointError as error:
            note(f"Skipped {path.name}: {error}")
            continue
        found.append((_furthest(checkpoint), path, checkpoint))
    for _, path, checkpoint in sorted(found, key=lambda entry: entry[0], reverse=True):
        reason = _reason_against(checkpoint) or (refuse(checkpoint) if refuse is not None else None)
        if reason is None:
            return path
        note(f"Skipped {path.name}: {reason}")
    return None


def _candidates(directory: Path) -> list[Path]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("listing", directory, error) from error
    folders = (entry for entry in entries if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."))
    return [
        directory / entry.name
        for entry in folders
        if entry.name.endswith(".ckpt") or os.path.lexists(os.path.join(entry.path, MANIFEST))
    ]


def _furthest(checkpoint: Checkpoint) -> tuple[int, int, float]:
    document = checkpoint.document if isinstance(checkpoint.document, dict) else {}
    progress = document.get("progress")
    counts = progress if isinstance(progress, dict) else {}
    step, batch = counts.get("global_step"), counts.get("batch", counts.get("global_batch"))
    return (
        step if isinstance(step, int) else -1,
        batch if isinstance(batch, int) else -1,
        checkpoint.manifest.saved_at,
    )


def _reason_against(checkpoint: Checkpoint) -> str | None:
    if not checkpoint.finite:
        return f"its weight {checkpoint.manifest.nonfinite!r} is not finite."
    problems = verify(checkpoint.path)
    return None if not problems else problems[0]


def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint: its name disappears at once, its files after. A link is removed, never what it points to.

    Raises:
        StorageError: it holds something else than a checkpoint does, or cannot be deleted.
    """
    folder = Path(path)
    if folder.is_symlink():
        folder.unlink()
        return
    if not is_ours(folder):
        raise StorageError(f"{str(folder)!r} is not a checkpoint or holds other files; it is not deleted.")
    retire_directory(folder)
