"""Operations on an entire checkpoint: reading it as a dict, and deleting it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor

from ..core.arguments import names_arguments
from ..core.errors import CheckpointError, StorageError
from ..system.atomic_directories import delete_hidden, hide_directory
from . import codec
from .manifest import MODEL
from .manifest_file import is_ours
from .reader import open_checkpoint

STATE = "state"


@names_arguments
def weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the model's tensors by name, on the CPU; tied names share one tensor.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or holds no weights.
    """
    checkpoint = open_checkpoint(path)
    if MODEL not in checkpoint.sections:
        raise CheckpointError(
            f"{str(path)!r} holds no weights; it holds: {', '.join(checkpoint.sections) or 'nothing'}."
        )
    return checkpoint.read_section(MODEL)


@names_arguments
def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a checkpoint as one dict.

    ``"state_dict"`` holds the model's tensors, ``"optimizer_tensors"`` the optimizers' by parameter, and the other keys
    hold the remaining saved values, decoded.

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


@names_arguments
def remove(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint: its name disappears at once, then its files. A link is removed, never its target.

    Raises:
        StorageError: the directory holds something that no checkpoint holds, or cannot be deleted.
    """
    hidden = hide(path)
    if hidden is not None:
        delete_hidden(hidden)


def hide(path: str | os.PathLike[str]) -> Path | None:
    """Rename a checkpoint to a hidden name before deletion; return that name, or None for a link, which is removed.

    Raises:
        StorageError: the directory holds something that no checkpoint holds, or cannot be renamed.
    """
    folder = Path(path)
    if folder.is_symlink():
        folder.unlink()
        return None
    if not is_ours(folder):
        raise StorageError(f"{str(folder)!r} is not a checkpoint or holds other files; it is not deleted.")
    return hide_directory(folder)
