"""Export of a checkpoint's tensors as plain safetensors, for other programs."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from ..core.arguments import names_arguments
from ..core.errors import unknown
from ..core.size_text import size_in_bytes
from .manifest import MODEL
from .reader import Checkpoint, open_checkpoint
from .safetensors_export import PlainTensors, target_dtype, write_plain
from .stored_tensor import SavedTensor, StoredTensor

AVERAGES = "averages"


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
