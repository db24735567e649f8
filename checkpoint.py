"""``phalanx.checkpoint``: what a user does with a checkpoint on a disk. Nothing in here pickles or unpickles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from .framework.checkpoint.consolidate import consolidate as consolidate
    from .framework.checkpoint.convert.convert import convert as convert
    from .framework.checkpoint.diff import Difference as Difference
    from .framework.checkpoint.diff import diff as diff
    from .framework.checkpoint.finite_check import has_nonfinite as has_nonfinite
    from .framework.checkpoint.inspect_manifest import Inspection as Inspection
    from .framework.checkpoint.inspect_manifest import inspect as inspect
    from .framework.checkpoint.latest import newest_good as newest_good
    from .framework.checkpoint.listing import Listed as Listed
    from .framework.checkpoint.listing import checkpoints as checkpoints
    from .framework.checkpoint.reader import Checkpoint as Checkpoint
    from .framework.checkpoint.reader import open_checkpoint as open_checkpoint
    from .framework.checkpoint.verify import is_complete as is_complete
    from .framework.checkpoint.verify import verify as verify
    from .framework.checkpoint.whole_checkpoint import load as load
    from .framework.checkpoint.whole_checkpoint import remove as remove
    from .framework.checkpoint.whole_checkpoint import weights as weights
    from .framework.checkpoint.write_plan import Shard as Shard
    from .framework.checkpoint.write_plan import Snapshot as Snapshot
    from .framework.checkpoint.writer import Save as Save
    from .framework.checkpoint.writer import save as save
    from .framework.system.atomic_files import clean_leftovers as clean_leftovers

_HOMES = {
    "Checkpoint": ".framework.checkpoint.reader",
    "Difference": ".framework.checkpoint.diff",
    "Inspection": ".framework.checkpoint.inspect_manifest",
    "Listed": ".framework.checkpoint.listing",
    "Save": ".framework.checkpoint.writer",
    "Shard": ".framework.checkpoint.write_plan",
    "Snapshot": ".framework.checkpoint.write_plan",
    "checkpoints": ".framework.checkpoint.listing",
    "clean_leftovers": ".framework.system.atomic_files",
    "consolidate": ".framework.checkpoint.consolidate",
    "convert": ".framework.checkpoint.convert.convert",
    "diff": ".framework.checkpoint.diff",
    "has_nonfinite": ".framework.checkpoint.finite_check",
    "inspect": ".framework.checkpoint.inspect_manifest",
    "is_complete": ".framework.checkpoint.verify",
    "load": ".framework.checkpoint.whole_checkpoint",
    "newest_good": ".framework.checkpoint.latest",
    "open_checkpoint": ".framework.checkpoint.reader",
    "remove": ".framework.checkpoint.whole_checkpoint",
    "save": ".framework.checkpoint.writer",
    "verify": ".framework.checkpoint.verify",
    "weights": ".framework.checkpoint.whole_checkpoint",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = face(__name__, _HOMES)
