"""``phalanx.checkpoint``: what a user does with a checkpoint on a disk. Nothing in here pickles or unpickles."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from .framework.checkpoint.consolidation import consolidate as consolidate
    from .framework.checkpoint.convert.conversion import convert as convert
    from .framework.checkpoint.difference import Difference as Difference
    from .framework.checkpoint.difference import diff as diff
    from .framework.checkpoint.finite import has_nonfinite as has_nonfinite
    from .framework.checkpoint.inspection import Inspection as Inspection
    from .framework.checkpoint.inspection import inspect as inspect
    from .framework.checkpoint.listing import Listed as Listed
    from .framework.checkpoint.listing import checkpoints as checkpoints
    from .framework.checkpoint.newest import newest_good as newest_good
    from .framework.checkpoint.plan import Shard as Shard
    from .framework.checkpoint.plan import Snapshot as Snapshot
    from .framework.checkpoint.read import Checkpoint as Checkpoint
    from .framework.checkpoint.read import open_checkpoint as open_checkpoint
    from .framework.checkpoint.store import load as load
    from .framework.checkpoint.store import remove as remove
    from .framework.checkpoint.store import weights as weights
    from .framework.checkpoint.verification import is_complete as is_complete
    from .framework.checkpoint.verification import verify as verify
    from .framework.checkpoint.write import Save as Save
    from .framework.checkpoint.write import save as save
    from .framework.system.atomic_files import clean_leftovers as clean_leftovers

_HOMES = {
    "Checkpoint": ".framework.checkpoint.read",
    "Difference": ".framework.checkpoint.difference",
    "Inspection": ".framework.checkpoint.inspection",
    "Listed": ".framework.checkpoint.listing",
    "Save": ".framework.checkpoint.write",
    "Shard": ".framework.checkpoint.plan",
    "Snapshot": ".framework.checkpoint.plan",
    "checkpoints": ".framework.checkpoint.listing",
    "clean_leftovers": ".framework.system.atomic_files",
    "consolidate": ".framework.checkpoint.consolidation",
    "convert": ".framework.checkpoint.convert.conversion",
    "diff": ".framework.checkpoint.difference",
    "has_nonfinite": ".framework.checkpoint.finite",
    "inspect": ".framework.checkpoint.inspection",
    "is_complete": ".framework.checkpoint.verification",
    "load": ".framework.checkpoint.store",
    "newest_good": ".framework.checkpoint.newest",
    "open_checkpoint": ".framework.checkpoint.read",
    "remove": ".framework.checkpoint.store",
    "save": ".framework.checkpoint.write",
    "verify": ".framework.checkpoint.verification",
    "weights": ".framework.checkpoint.store",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = face(__name__, _HOMES)
