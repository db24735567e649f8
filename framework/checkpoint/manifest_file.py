"""Recognition of a checkpoint and reading of its manifest, before any tensor is read. Does not import torch."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ..core.errors import CheckpointError, did_you_mean
from .manifest import FILE_NAME, MANIFEST, MAX_MANIFEST_BYTES, START_BYTES, Manifest, check_start, parse
from .safetensors_header import PlainFile

# The part of a file of torch.save that begins with the keys of the saved dict.
_HEAD_BYTES = 1 << 16


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return a checkpoint's validated manifest.

    Raises:
        CheckpointError: there is none, it is damaged, or of a newer format version.
    """
    return parse_at(path, read_manifest_bytes(path))


def parse_at(path: str | os.PathLike[str], data: bytes) -> Manifest:
    """Return the manifest in ``data``, which was read from the checkpoint ``path``.

    Raises:
        CheckpointError: it is damaged, or of a newer format version; the message names the checkpoint.
    """
    try:
        return parse(data)
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {os.fspath(path)!r}: {error}") from error


def read_manifest_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return the bytes of a checkpoint's manifest; only the beginning is checked.

    Raises:
        CheckpointError: there is no manifest, it is too long, or its first bytes are wrong.
    """
    folder = Path(path)
    _check_directory(folder)
    file = PlainFile(folder / MANIFEST)
    # The first bytes identify a manifest before a file of any size is read.
    try:
        check_start(file.read(min(file.size, START_BYTES)))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {str(folder)!r}: {error}") from error
    if file.size > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"checkpoint {str(folder)!r}: its manifest has {file.size:,} bytes, more than the {MAX_MANIFEST_BYTES:,} "
            "that are read; it is damaged."
        )
    return file.read(file.size)


def _how_to_read(path: Path) -> str:
    """Return the next step for a file that is given as a checkpoint; nothing of it is unpickled."""
    load = "module.load_state_dict(torch.load(path, weights_only=True)) before"
    convert = f"convert it: phalanx checkpoint convert {path} OUT"
    head = b""
    with suppress(OSError), path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if not head.startswith(b"PK"):
        return f"If torch.save wrote a state_dict to it, call {load}; if Lightning wrote it, {convert}."
    if b"pytorch-lightning_version" in head:
        return f"Lightning wrote it: {convert}."
    return f"torch.save wrote it: if it holds a state_dict, call {load}, and leave the path out."


def _check_directory(folder: Path) -> None:
    try:
        names = os.listdir(folder)
    except NotADirectoryError:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} is a file, and a checkpoint is a directory. {_how_to_read(folder)}"
        ) from None
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {str(folder)!r} does not exist.{_interrupted(folder)}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {str(folder)!r} cannot be read: {error}.") from error
    if MANIFEST not in names:
        several = sum(os.path.lexists(folder / name / MANIFEST) for name in names)
        below = f" It is a directory of {several}: `phalanx checkpoint list` shows them." if several else ""
        raise CheckpointError(
            f"{str(folder)!r} holds no {MANIFEST}: it is not a checkpoint, or not a complete one.{below}"
        )


def _interrupted(folder: Path) -> str:
    try:
        names = os.listdir(folder.parent)
    except OSError:
        return ""
    if any(name.startswith(f".{folder.name}.") and name.endswith(".old") for name in names):
        return " A replacement of it was interrupted: phalanx.checkpoint.clean_leftovers puts the previous one back."
    return did_you_mean(folder.name, [name for name in names if not name.startswith(".")])


def is_ours(path: Path) -> bool:
    """Whether a directory contains only files of a checkpoint, damaged or not, so that deleting it is safe."""
    if path.is_symlink() or not path.is_dir():
        return False
    names = os.listdir(path)
    return all(name == MANIFEST or FILE_NAME.fullmatch(name) for name in names)
