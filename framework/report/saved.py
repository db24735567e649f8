"""The checkpoints of a run, from their manifests."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.inspection import best_recorded, candidates, inspection_of, monitored
from ..checkpoint.manifest import MANIFEST, Manifest, read_manifest, run_of
from ..checkpoint.verify import first_incomplete
from ..core.errors import CheckpointError, PhalanxError
from ..storage.cached_url import local_place
from .run_files import RunFiles
from .values import text, timestamp

# Manifests name every tensor: reading them all would take seconds in a folder with many large checkpoints.
_MOST_READ = 12
_MOST_MANIFEST_BYTES = 16 << 20


@dataclass(frozen=True)
class Saved:
    """The newest checkpoints of a run, and the number of all of them."""

    rows: list[dict[str, Any]]
    count: int

    @property
    def newest(self) -> dict[str, Any] | None:
        """The complete checkpoint with the most progress from which the run can be resumed."""
        good = [row for row in self.rows if row["complete"] and row["kind"] == "trainer"]
        return max(good, key=lambda row: (row["step"] or 0, row["saved_at"]), default=None)


def saved_checkpoints(files: RunFiles) -> Saved:
    """Return the checkpoints that a run has saved."""
    found: list[tuple[float, Path]] = []
    for directory in dict.fromkeys(files.checkpoint_directories):
        with contextlib.suppress(PhalanxError, OSError):
            found += [(_saved_at(path), path) for path in candidates(directory)]
    found.sort(key=lambda pair: pair[0], reverse=True)
    rows = [row for _, path in found[:_MOST_READ] if (row := _described(path, files.identity)) is not None]
    others = max(0, len(found) - _MOST_READ)
    return Saved(sorted(rows, key=lambda row: (row["step"] or 0, row["saved_at"])), len(rows) + others)


def best_checkpoint(files: RunFiles, saved: Saved | None = None) -> str | None:
    """Return the path of the best checkpoint of a run, or None if it has none that is complete.

    It is the one that the report names. A run that could not write its report, or that trains, has it in the records
    of its newest checkpoint.

    Args:
        saved: the checkpoints of the run, if they are known.
    """
    named = text(files.outcome.get("best_checkpoint"))
    if not named and (newest := (saved or saved_checkpoints(files)).newest) is not None:
        named = best_recorded(read_manifest(newest["path"])) or ""
    # The directory of the run may have been moved with its checkpoints.
    places = (local_place(named), files.directory / "checkpoints" / Path(named).name) if named else ()
    return next((str(path) for path in places if _is_complete(path, files.identity)), None)


def _is_complete(path: Path, identity: str | None) -> bool:
    """Whether the run with this identity has saved a checkpoint here, all files of which have their sizes."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return False
    return _is_of(manifest, identity) and first_incomplete(path, manifest) is None


def _is_of(manifest: Manifest, identity: str | None) -> bool:
    """Whether a checkpoint was saved by the run with this identity, as far as either is known."""
    return identity is None or run_of(manifest) in (None, identity)


def _saved_at(path: Path) -> float:
    with contextlib.suppress(OSError):
        return os.stat(path / MANIFEST).st_mtime
    return 0.0


def _described(path: Path, identity: str | None) -> dict[str, Any] | None:
    """Return the description of a checkpoint; None for one of another run."""
    row: dict[str, Any] = {
        "path": str(path), "name": path.name, "complete": False, "kind": None, "step": None, "epoch": None,
        "metric": None, "bytes": None, "saved_at": "", "problem": None,
    }  # fmt: skip
    try:
        if os.stat(path / MANIFEST).st_size > _MOST_MANIFEST_BYTES:
            return row | {"problem": "its manifest is too large to be read here; phalanx checkpoint inspect reads it"}
        manifest = read_manifest(path)
        if not _is_of(manifest, identity):
            return None
        found, metric = inspection_of(path, manifest), monitored(manifest)
        problem = first_incomplete(path, manifest)
        if problem is None and manifest.nonfinite is not None:
            problem = f"its weight {manifest.nonfinite!r} is not finite"
    except (PhalanxError, OSError, ValueError) as error:
        return row | {"problem": str(error)}
    return row | {
        "complete": problem is None,
        "problem": problem,
        "kind": found.kind,
        "step": found.step,
        "epoch": found.epoch,
        "metric": None if metric is None else {"name": metric[0], "value": metric[1]},
        "bytes": found.bytes,
        "saved_at": timestamp(found.saved_at),
    }
