"""``rescue``: the newest snapshot of a launch that has failed, written out as a checkpoint."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ..checkpoint.inspection import furthest, newest_complete
from ..checkpoint.manifest import Manifest, read_manifest, run_of
from ..core.errors import PhalanxError
from ..system.atomic_directories import HiddenDirectory, link_files, replace_directory
from .restart_policy import memory_link

_TARGET = "target"


def keep_target(folder: Path, target: Path) -> None:
    """Record the path that the newest snapshot in ``folder`` is written to if the launch fails."""
    link = folder / _TARGET
    link.unlink(missing_ok=True)
    link.symlink_to(target)


def rescue(launch_directory: str) -> str:
    """Write the newest snapshot to its target, unless a checkpoint of the run beside it has as much progress.

    Returns:
        A sentence about the checkpoint, or about the error if it cannot be written; empty if there is nothing to write.
    """
    folders = sorted(memory_link(launch_directory).glob("fit_*"), reverse=True)
    for link in (folder / _TARGET for folder in folders if (folder / _TARGET).is_symlink()):
        target = Path(os.readlink(link))
        try:
            snapshot = newest_complete([link.parent], lambda manifest: None)
            if snapshot is None and any(link.parent.glob("*.ckpt")):
                return "the newest snapshot in memory is lost: parts of it are on other nodes"
            if snapshot is not None and not _is_behind(read_manifest(snapshot), target.parent):
                return f"the newest snapshot in memory was saved as {_copied(snapshot, target)}"
        except (PhalanxError, OSError) as error:
            return f"the newest snapshot in memory is lost: {error}"
    return ""


def _is_behind(snapshot: Manifest, folder: Path) -> bool:
    def refused(manifest: Manifest) -> str | None:
        return None if run_of(manifest) == run_of(snapshot) else "another run saved it."

    saved = newest_complete([folder], refused)
    return saved is not None and furthest(read_manifest(saved))[:2] >= furthest(snapshot)[:2]


def _copied(snapshot: Path, target: Path) -> Path:
    hidden = HiddenDirectory(target)
    try:
        link_files(snapshot, hidden.path)
        replace_directory(hidden.path, target)
    except BaseException:
        shutil.rmtree(hidden.path, ignore_errors=True)
        raise
    finally:
        hidden.release()
    return target
