"""Export of tensors as plain safetensors for other programs: one file, or several files and an index.

Tensors are read and written in bounded slices, so no tensor has to fit into memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, did_you_mean, unknown
from ..core.size_text import size_in_bytes
from ..system.atomic_directories import remove_tree, replace_directory
from ..system.atomic_files import (
    hidden_sibling,
    make_directory,
    new_file,
    refuse_existing,
    refuse_url,
    storage_error,
    write_synced,
)
from .host_memory import dense
from .manifest import AVERAGES, MANIFEST, MODEL
from .reader import Checkpoint, SavedTensor, StoredTensor, open_checkpoint
from .safetensors_header import header_of
from .safetensors_io import CODES, DTYPES, bytes_of, code_of, size_of


@names_arguments
def consolidate(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    max_shard_size: int | str | None = None,
    dtype: str | torch.dtype | None = None,
    section: str = MODEL,
) -> Path:
    """Write a section of a checkpoint as plain safetensors, for other programs.

    Tensors of any size are read, checked, converted and written in slices of a few megabytes.

    Args:
        path: the checkpoint.
        out: a file that does not exist yet, or a directory, in which ``model.safetensors`` is written. With
            ``max_shard_size`` a new directory of ``model-00001-of-00002.safetensors`` and an index, as Hugging Face
            writes them.
        max_shard_size: the largest size of the tensors in one file, in bytes or as ``"5GB"``; a larger tensor gets a
            separate file.
        dtype: the dtype of floating-point tensors in the output: ``"bf16"``, ``"float16"``, ... Default: as saved.
        section: the section to write: the model's weights, the model with an average of them (``"averages/ema"``),
            ``"optimizer"``, ...

    Tied tensors are written under each of their names. Returns the file, or the directory.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged; nothing is written.
        ConfigurationError: ``out`` exists, an argument is wrong, or a value does not fit into ``dtype``.
        StorageError: ``out`` cannot be written.
    """
    if max_shard_size is not None:
        size_in_bytes(max_shard_size)
    converted = target_dtype(dtype)
    tensors = section_tensors(open_checkpoint(path), section)
    name = section.partition("/")[0]
    stem = MODEL if name != section else name
    return write_plain(PlainTensors(tensors, converted), out, max_shard_size, stem)


def validated_average(checkpoint: Checkpoint) -> str | None:
    """Return the name of the average with which the run of a checkpoint validates; None if with its trained weights."""
    document = checkpoint.document if isinstance(checkpoint.document, dict) else {}
    saved = document.get(AVERAGES) or {}
    # Checkpoints of earlier versions do not say it; validating with the average is the default.
    names = (name for name, one in saved.items() if one["count"] and one.get("evaluates", len(saved) == 1))
    return next(names, None)


def section_tensors(checkpoint: Checkpoint, given: str) -> dict[str, StoredTensor]:
    """Return the tensors of a section, or for ``<section>/<key>`` those whose names begin with the key, without the
    key.

    An average contains only the trained tensors; the rest of the model is added to it unchanged.

    Raises:
        UnknownNameError: there is no such section, or no tensor in it has such a key.
    """
    section, _, key = given.partition("/")
    names = checkpoint.names(section)
    prefix = f"{key}/" if key else ""
    found = [name for name in names if name.startswith(prefix)]
    if key and not found:
        raise unknown("section", given, {f"{section}/{name.partition('/')[0]}" for name in names if "/" in name})
    own = {name[len(prefix) :]: SavedTensor(checkpoint, section, name) for name in found}
    if section != AVERAGES or not key or MODEL not in checkpoint.sections:
        return dict(own)
    return {name: own.get(name, SavedTensor(checkpoint, MODEL, name)) for name in checkpoint.names(MODEL)}


# ---- plain files ----------------------------------------------------------------------------------------------------


SLICE_BYTES = 8 << 20
"""The bytes of a tensor in memory at a time; a few times as many during conversion."""
_SHORT = {
    "64": torch.float64,
    "32": torch.float32,
    "16": torch.float16,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "double": torch.float64,
    "float": torch.float32,
    "half": torch.float16,
}


def target_dtype(given: str | int | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype for a name such as ``"bf16"``, ``"float16"`` or ``"torch.float32"``; None for None.

    Raises:
        ConfigurationError: it is not a floating-point dtype that safetensors supports.
    """
    if given is None:
        return None
    known = {str(dtype).removeprefix("torch."): dtype for dtype in CODES if dtype.is_floating_point}
    known |= _SHORT | {code.lower(): dtype for code, dtype in DTYPES.items() if dtype.is_floating_point}
    found = known.get(str(given).lower().removeprefix("torch."))
    if found is None:
        raise ConfigurationError(
            f"dtype={str(given)!r} is not a dtype that weights can be written in.{did_you_mean(str(given), known)} "
            f"Known: {', '.join(sorted(known))}."
        )
    return found


class PlainTensors:
    """The tensors to write, read on demand, with floating-point tensors converted to ``dtype``."""

    def __init__(self, tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None = None) -> None:
        self._tensors = tensors
        self._dtype = dtype

    @property
    def names(self) -> list[str]:
        """The names, in order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor is written in."""
        own = self._tensors[name].dtype
        return own if self._dtype is None or not own.is_floating_point else self._dtype

    def size(self, *names: str) -> int:
        """Return the size in bytes of tensors in the output."""
        return sum(size_of(self.shape(name), self.dtype(name)) for name in names)

    def slices(self, name: str) -> Iterator[Tensor]:
        """Yield a tensor's elements in order, flattened, a bounded number at a time.

        Raises:
            CheckpointError: a part is damaged.
            ConfigurationError: a finite number is not finite in the requested dtype.
        """
        stored, dtype = self._tensors[name], self.dtype(name)
        total, step = prod(stored.shape), max(1, SLICE_BYTES // max(stored.dtype.itemsize, dtype.itemsize))
        for start in range(0, total, step):
            piece = dense(stored.read_flat(start, min(step, total - start)))
            yield piece if piece.dtype == dtype else _converted(name, piece, dtype)


def _converted(name: str, piece: Tensor, dtype: torch.dtype) -> Tensor:
    converted = piece.to(dtype)
    if dtype.itemsize < piece.dtype.itemsize or dtype == torch.float16:
        lost = converted.float().isfinite().logical_not_().logical_and_(piece.isfinite())
        if lost.any():
            raise ConfigurationError(
                f"tensor {name!r} holds {piece[lost][0].item():.4g}, which {dtype} cannot hold: write it in bf16 or "
                "float32, or leave dtype out."
            )
    return converted


def write_plain(
    tensors: PlainTensors,
    out: str | os.PathLike[str],
    max_shard_size: int | str | None,
    stem: str = "model",
    replaces: bool = False,
) -> Path:
    """Write tensors as one file ``out``, or with ``max_shard_size`` as a new directory of files and an index.

    If ``out`` is a directory, ``<stem>.safetensors`` is written in it. All files are synced before they are renamed to
    their final names. With ``replaces``, weights that were written there before are replaced.

    Raises:
        ConfigurationError: ``out`` exists, or ``max_shard_size`` is not a size.
        StorageError: ``out`` cannot be written.
    """
    refuse_url(out)
    target = Path(out)
    check_target(target, max_shard_size is not None, replaces)
    if max_shard_size is not None:
        return _write_shards(tensors, target, size_in_bytes(max_shard_size), stem)
    if target.is_dir():
        target = target / f"{stem}.safetensors"
        if not replaces:
            refuse_existing(target)
    with new_file(target, tensors.size(*tensors.names)) as temporary:
        _write_file(tensors, temporary, tensors.names)
    return target


def check_target(target: Path, as_directory: bool, replaces: bool = False) -> None:
    """Refuse to overwrite an existing target, or with ``replaces`` one that does not hold such weights.

    A directory may exist if a file is created in it.

    Raises:
        ConfigurationError: the target exists, or is inside a checkpoint.
    """
    if as_directory and os.path.lexists(target) and not (replaces and _holds_shards(target)):
        raise ConfigurationError(f"{str(target)!r} exists; with max_shard_size it is made as a new directory.")
    if os.path.lexists((target if target.is_dir() else target.parent) / MANIFEST):
        raise ConfigurationError(
            f"{str(target)!r} lies in a checkpoint, which holds its own files alone; choose another place."
        )
    if not target.is_dir() and not (replaces and target.suffix == ".safetensors" and target.is_file()):
        refuse_existing(target)


def _holds_shards(directory: Path) -> bool:
    """Whether a directory has the files of ``_write_shards`` and no others."""
    names = [path.name for path in directory.iterdir()] if directory.is_dir() else []
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    return len(indexes) == 1 and all(name.endswith(".safetensors") for name in names if name not in indexes)


def _write_file(tensors: PlainTensors, path: Path, names: Sequence[str]) -> None:
    names = sorted(names, key=lambda name: -tensors.dtype(name).itemsize)
    header, _ = header_of([(name, code_of(tensors.dtype(name), name), tensors.shape(name)) for name in names])
    with path.open("xb", buffering=0) as file:
        file.write(header)
        for name in names:
            for piece in tensors.slices(name):
                memory = bytes_of(piece)
                while memory:
                    memory = memory[file.write(memory) :]
        os.fsync(file.fileno())


def _write_shards(tensors: PlainTensors, target: Path, limit: int, stem: str) -> Path:
    temporary = hidden_sibling(target, "tmp")
    groups = _groups(tensors, limit)
    files = {f"{stem}-{number:05d}-of-{len(groups):05d}.safetensors": names for number, names in enumerate(groups, 1)}
    homes = {name: file for file, names in files.items() for name in names}
    total = tensors.size(*tensors.names)
    try:
        make_directory(temporary)
        for file, names in files.items():
            _write_file(tensors, temporary / file, names)
        index = json.dumps({"metadata": {"total_size": total}, "weight_map": homes}, indent=2)
        write_synced(temporary / f"{stem}.safetensors.index.json", index.encode("utf-8"))
        replace_directory(temporary, target)
    except BaseException as error:
        if temporary.is_dir():
            remove_tree(temporary)
        if isinstance(error, OSError):
            raise storage_error("writing", target, error, total) from error
        raise
    return target


def _groups(tensors: PlainTensors, limit: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    held = 0
    for name in tensors.names:
        size = tensors.size(name)
        if groups[-1] and held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups
