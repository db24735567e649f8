"""What a directory is, before any tensor is read: a checkpoint with a good manifest, or not. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import CheckpointError
from .manifest import FILE_NAME, MANIFEST, Manifest, parse
from .tensor_file import PlainFile


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return a checkpoint's manifest, checked.

    Raises:
        CheckpointError: there is none, it is damaged, or of a newer format version.
    """
    folder = Path(path)
    if not folder.is_dir():
        kind = "is a file, and a checkpoint is a directory" if folder.exists() else "does not exist"
        raise CheckpointError(f"checkpoint {str(folder)!r} {kind}.{_interrupted(folder)}")
    if not os.path.lexists(folder / MANIFEST):
        raise CheckpointError(f"{str(folder)!r} holds no {MANIFEST}: it is not a checkpoint, or not a complete one.")
    file = PlainFile(folder / MANIFEST)
    try:
        return parse(file.read(file.size))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {str(folder)!r}: {error}") from error


def _interrupted(folder: Path) -> str:
    if folder.parent.is_dir() and any(folder.parent.glob(f".{folder.name}.*.old")):
        return " A replacement of it was interrupted: phalanx.checkpoint.clean_leftovers puts the previous one back."
    return ""


def is_ours(path: Path) -> bool:
    """Whether a directory holds nothing but what a checkpoint holds, damaged or not; so that deleting it is safe."""
    if path.is_symlink() or not path.is_dir():
        return False
    names = os.listdir(path)
    return all(name == MANIFEST or FILE_NAME.fullmatch(name) for name in names)
