"""``phalanx.checkpoint``: read, write, compare and convert checkpoints. None of phalanx contains a pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from .framework.checkpoint.consolidate import consolidate as consolidate
    from .framework.checkpoint.convert.convert import convert as convert
    from .framework.checkpoint.diff import Difference as Difference, diff as diff
    from .framework.checkpoint.finite_check import has_nonfinite as has_nonfinite
    from .framework.checkpoint.inspect_manifest import Inspection as Inspection, inspect as inspect
    from .framework.checkpoint.listing import Listed as Listed, checkpoints as checkpoints, newest_good as newest_good
    from .framework.checkpoint.reader import Checkpoint as Checkpoint, open_checkpoint as open_checkpoint
    from .framework.checkpoint.stale_files import clean_leftovers as clean_leftovers
    from .framework.checkpoint.verify import is_complete as is_complete, verify as verify
    from .framework.checkpoint.whole_checkpoint import load as load, remove as remove, weights as weights
    from .framework.checkpoint.write_plan import Shard as Shard, Snapshot as Snapshot
    from .framework.checkpoint.writer import Save as Save, save as save
    from .framework.pretrained.fingerprint import fingerprint as fingerprint

_HOMES = {
    ".framework.checkpoint.consolidate": "consolidate",
    ".framework.checkpoint.convert.convert": "convert",
    ".framework.checkpoint.diff": "Difference diff",
    ".framework.checkpoint.finite_check": "has_nonfinite",
    ".framework.checkpoint.inspect_manifest": "Inspection inspect",
    ".framework.checkpoint.listing": "Listed checkpoints newest_good",
    ".framework.checkpoint.reader": "Checkpoint open_checkpoint",
    ".framework.checkpoint.stale_files": "clean_leftovers",
    ".framework.checkpoint.verify": "is_complete verify",
    ".framework.checkpoint.whole_checkpoint": "load remove weights",
    ".framework.checkpoint.write_plan": "Shard Snapshot",
    ".framework.checkpoint.writer": "Save save",
    ".framework.pretrained.fingerprint": "fingerprint",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES)
