"""The checkpoints of a run, from their manifests."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..checkpoint.inspect_manifest import inspection_of, kind_of, monitored
from ..checkpoint.listing import candidates
from ..checkpoint.manifest import MANIFEST
from ..checkpoint.manifest_file import read_manifest
from ..checkpoint.verify import first_incomplete
from ..core.errors import PhalanxError
from .times import timestamp

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


def saved_checkpoints(directories: list[Path], identity: str | None) -> Saved:
    """Return the checkpoints that the run with this identity has saved into any of the directories."""
    found: list[tuple[float, Path]] = []
    for directory in dict.fromkeys(directories):
        with contextlib.suppress(PhalanxError, OSError):
            found += [(_saved_at(path), path) for path in candidates(directory)]
    found.sort(key=lambda pair: pair[0], reverse=True)
    rows = [row for _, path in found[:_MOST_READ] if (row := _described(path, identity)) is not None]
    others = max(0, len(found) - _MOST_READ)
    return Saved(sorted(rows, key=lambda row: (row["step"] or 0, row["saved_at"])), len(rows) + others)


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
        document = manifest.document if isinstance(manifest.document, dict) else {}
        if identity is not None and document.get("run") not in (None, identity):
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
        "kind": kind_of(manifest),
        "step": found.step,
        "epoch": found.epoch,
        "metric": None if metric is None else {"name": metric[0], "value": metric[1]},
        "bytes": found.bytes,
        "saved_at": timestamp(found.saved_at),
    }
