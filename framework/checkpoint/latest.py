"""Search for the checkpoint to resume from, by contents and never by a pointer file. Does not import torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..core.errors import CheckpointError
from ..system.atomic_files import storage_error
from .manifest import MANIFEST, Manifest
from .manifest_file import read_manifest
from .verify import verify


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
        found.append((_furthest(manifest), path, manifest))
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


def _furthest(manifest: Manifest) -> tuple[int, int, float]:
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
