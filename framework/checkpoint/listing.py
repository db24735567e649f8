"""List of the checkpoints in a directory. Does not import torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CheckpointError
from .inspect_manifest import inspection_of, monitored
from .latest import candidates
from .manifest import MANIFEST
from .manifest_file import parse_at, read_manifest_bytes
from .verify import first_incomplete
from .verify import verify as verified


@dataclass(frozen=True)
class Listed:
    """A checkpoint in a directory. For a damaged one, possibly only its name and the problem are known."""

    path: Path
    status: str
    """``"complete"``: the manifest is good and all files have their sizes and headers. ``"good"``: every byte was read
    too. ``"damaged"``: see ``problem``."""
    problem: str | None = None
    kind: str | None = None
    """See ``Inspection``."""
    step: int | None = None
    epoch: int | None = None
    metric: tuple[str, float] | None = None
    """The metric that a ModelCheckpoint monitors, and its value."""
    bytes: int | None = None
    """The size of the tensor files and the manifest, in bytes."""
    saved_at: float | None = None
    """Seconds since 1970."""


def checkpoints(directory: str | os.PathLike[str], verify: bool = False) -> list[Listed]:
    """Return the checkpoints in a directory (not in subdirectories), sorted by progress, the furthest last.

    Links and unfinished saves are ignored. Only manifests and headers are read, which is cheap, unless ``verify`` is
    set, which reads every byte.

    Raises:
        CheckpointError: there is no such directory, or it is a checkpoint itself.
        StorageError: it cannot be read.
    """
    folder = Path(directory)
    if os.path.lexists(folder / MANIFEST):
        raise CheckpointError(f"{str(folder)!r} is a checkpoint itself: inspect it, or give the directory it lies in.")
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"{str(folder)!r} {kind}; give a directory that holds checkpoints.")
    found = [_listed(path, verify) for path in candidates(folder)]
    return sorted(found, key=lambda one: (-1 if one.step is None else one.step, one.saved_at or -1.0))


def _listed(path: Path, verify: bool) -> Listed:
    try:
        data = read_manifest_bytes(path)
        manifest = parse_at(path, data)
    except CheckpointError as error:
        return Listed(path, "damaged", str(error))
    problem = next(iter(verified(path)), None) if verify else first_incomplete(path, manifest)
    status = "damaged" if problem else "good" if verify else "complete"
    inspection = inspection_of(path, manifest)
    return Listed(
        path=path,
        status=status,
        problem=problem,
        kind=inspection.kind,
        step=inspection.step,
        epoch=inspection.epoch,
        metric=monitored(manifest),
        bytes=inspection.bytes + len(data),
        saved_at=inspection.saved_at,
    )
