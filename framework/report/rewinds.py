"""``rewinds.json`` in a run's directory: when the run went back to a checkpoint, and which data it leaves out since.

The file is written by ``phalanx rewind`` and by a fit with ``nonfinite="rewind"``, and read by the next fit that
continues the run.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..checkpoint.inspection import furthest, good_manifests
from ..checkpoint.manifest import read_manifest, run_of
from ..core.data_spans import Span, as_json, from_json
from ..core.errors import StorageError
from ..storage.cached_url import url_of
from ..storage.mirror import before_deletion
from ..storage.remote_file import download_file
from ..system.atomic_files import storage_error, write_text

REWINDS = "rewinds.json"
"""The name of the file."""
SET_ASIDE = "rewound"
"""The folder, beside the checkpoints of a run, of those that were saved after the one that it went back to."""
NONFINITE, COMMAND = "nonfinite", "command"


@dataclass(frozen=True)
class Rewind:
    """A return to a checkpoint."""

    cause: str
    """``NONFINITE`` or ``COMMAND``."""
    from_step: int
    """Optimizer steps that the run had made."""
    to_step: int
    """Optimizer steps that it has made in the checkpoint."""
    checkpoint: str
    """The checkpoint's name."""
    left_out: Sequence[Span]
    """The data that is left out from now on."""
    reason: str = ""
    """The message of the error, if there was one."""
    time: float = 0.0
    """In seconds since 1970."""

    def document(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {**vars(self), "left_out": as_json(self.left_out)}

    @classmethod
    def parse(cls, document: dict[str, Any]) -> Rewind:
        """Read ``document``. Raises ``TypeError``, ``ValueError`` or ``LookupError`` if it is damaged."""
        return cls(**{**document, "left_out": from_json(document["left_out"])})

    @property
    def sentence(self) -> str:
        """A description for the console and the report."""
        left_out = f" and left out {', '.join(map(str, self.left_out))}" if self.left_out else ""
        return f"at step {self.from_step:,} it went back to {self.checkpoint} (step {self.to_step:,}){left_out}"


def rewinds_of(directory: Path) -> list[Rewind]:
    """Return the rewinds of a run, the newest last.

    Raises:
        StorageError: the file cannot be read. Without it, the run would train on data that it is to leave out.
    """
    path = directory / REWINDS
    try:
        return [Rewind.parse(entry) for entry in json.loads(path.read_bytes())["rewinds"]]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise storage_error("reading", path, error) from error
    except (ValueError, TypeError, LookupError) as error:
        raise StorageError(
            f"{path} is damaged ({error.__class__.__name__}), so it is not known which data the run leaves out: "
            "restore the file, or delete it to leave nothing out."
        ) from None


def add_rewind(directory: Path, folders: Iterable[Path], target: Path, rewind: Rewind) -> list[Path]:
    """Make the next fit of a run continue from a checkpoint; return where its newer checkpoints are now.

    They are moved, and not deleted, before the rewind is recorded: if this process is killed in between, the run only
    repeats what it has done.

    Args:
        directory: the run's directory.
        folders: the directories that it saves into.
        target: the checkpoint.
        rewind: the record; its time is set here.

    Raises:
        StorageError: a checkpoint cannot be moved, or the record not be written.
    """
    manifest = read_manifest(target)
    newer = [
        path
        for path, each in good_manifests(folders)
        if run_of(each) == run_of(manifest) and furthest(each)[:2] > furthest(manifest)[:2]
    ]
    moved = [_set_aside(path) for path in newer]
    record = [each.document() for each in (*rewinds_of(directory), replace(rewind, time=round(time.time(), 3)))]
    write_text(directory / REWINDS, json.dumps({"schema": 1, "rewinds": record}, indent=2) + "\n")
    return moved


def _set_aside(path: Path) -> Path:
    if url_of(path) is not None:
        # It is not found in the bucket by its old name from now on.
        for name in read_manifest(path).files:
            download_file(path / name)
            if not (path / name).exists():
                raise StorageError(f"{path.name} cannot be set aside: {name} could not be downloaded to {str(path)!r}.")
        before_deletion(path)
    folder = path.parent / SET_ASIDE
    place, number = folder / path.name, 1
    try:
        folder.mkdir(exist_ok=True)
        while os.path.lexists(place):
            number += 1
            place = folder / f"{path.stem}-{number}{path.suffix}"
        path.rename(place)
    except OSError as error:
        raise storage_error("moving", path, error) from error
    return place
