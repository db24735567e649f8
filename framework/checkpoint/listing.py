"""List of the checkpoints in a directory, and the search for the one to resume from. Does not import torch.

The search goes by contents and never by a pointer file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..core.arguments import names_arguments
from ..core.errors import CheckpointError
from ..system.atomic_files import storage_error
from .inspect_manifest import inspection_of, monitored
from .manifest import MANIFEST, Manifest
from .manifest_file import parse_at, read_manifest, read_manifest_bytes
from .verify import first_incomplete, verify, verify as verified


@names_arguments
def newest_good(
    directory: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    note: Callable[[str], None],
    refuse: Callable[[Manifest], str | None] | None = None,
) -> Path | None:
    """Return the checkpoint with the most progress that verifies, in ``directory`` or in one of several, or None.

    Checkpoints are compared by the progress in their manifests (optimizer steps, then batches, then the time of
    saving), never by names or a pointer file. ``note`` is called with the reason for each better checkpoint that was
    skipped: it is damaged, has weights that are not finite, or was rejected by ``refuse``. Links and unfinished saves
    are ignored.
    """
    found: list[tuple[tuple[int, int, float], Path, Manifest]] = []
    directories = [directory] if isinstance(directory, (str, os.PathLike)) else directory
    for path in (path for each in directories for path in candidates(Path(each))):
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            note(f"Skipped {path.name}: {error}")
            continue
        found.append((furthest(manifest), path, manifest))
    for _, path, manifest in sorted(found, key=lambda entry: entry[0], reverse=True):
        reason = _reason_against(path, manifest) or (refuse(manifest) if refuse is not None else None)
        if reason is None:
            return path
        note(f"Skipped {path.name}: {reason}")
    return None


def candidates(directory: Path) -> Iterator[Path]:
    """Yield the possible checkpoints in a directory, sorted by name, without links and hidden entries.

    Raises:
        StorageError: it cannot be listed.
    """
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error("listing", directory, error) from error
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
        if is_folder and (entry.name.endswith(".ckpt") or os.path.lexists(os.path.join(entry.path, MANIFEST))):
            yield directory / entry.name


def newest_complete(
    directories: Iterable[Path], refuse: Callable[[Manifest], str | None], preferred: Path | None = None
) -> Path | None:
    """Return the complete checkpoint with the most progress in one of several directories, or None.

    Only manifests and headers are read, unlike in ``newest_good``. ``preferred`` is returned if no other has more
    progress. Those with weights that are not finite are ignored, and those for which ``refuse`` returns a reason.

    Raises:
        StorageError: a directory cannot be listed.
    """
    found: list[tuple[tuple[int, int, float], bool, Path, Manifest]] = []
    for path in (path for each in directories for path in candidates(each)):
        with suppress(CheckpointError):
            manifest = read_manifest(path)
            if manifest.nonfinite is None and refuse(manifest) is None:
                found.append((furthest(manifest), path == preferred, path, manifest))
    found.sort(key=lambda entry: entry[:2], reverse=True)
    return next((path for _, _, path, manifest in found if first_incomplete(path, manifest) is None), None)


def furthest(manifest: Manifest) -> tuple[int, int, float]:
    """Return the progress of a checkpoint to compare it by: optimizer steps, batches, and the time of saving."""
    document = manifest.document if isinstance(manifest.document, dict) else {}
    progress = document.get("progress")
    counts = progress if isinstance(progress, dict) else {}
    step, batch = counts.get("global_step"), counts.get("batch", counts.get("global_batch"))
    return (
        step if isinstance(step, int) else -1,
        batch if isinstance(batch, int) else -1,
        manifest.saved_at,
    )


def _reason_against(path: Path, manifest: Manifest) -> str | None:
    if manifest.nonfinite is not None:
        return f"its weight {manifest.nonfinite!r} is not finite."
    problems = verify(path)
    return None if not problems else problems[0]


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


@names_arguments
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
