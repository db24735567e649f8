"""``phalanx.checkpoint``: read, write, compare and convert checkpoints. None of phalanx contains a pickle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from .framework.checkpoint.convert.convert import convert as convert
    from .framework.checkpoint.deletion import clean_leftovers as clean_leftovers, remove as remove
    from .framework.checkpoint.diff import Difference as Difference, diff as diff
    from .framework.checkpoint.finite_check import has_nonfinite as has_nonfinite
    from .framework.checkpoint.inspection import (
        Inspection as Inspection,
        Listed as Listed,
        checkpoints as checkpoints,
        inspect as inspect,
        newest_good as newest_good,
    )
    from .framework.checkpoint.reader import (
        Checkpoint as Checkpoint,
        load as load,
        open_checkpoint as open_checkpoint,
        weights as weights,
    )
    from .framework.checkpoint.safetensors_export import consolidate as consolidate
    from .framework.checkpoint.verify import is_complete as is_complete, verify as verify
    from .framework.checkpoint.write_plan import (
        CheckpointContents as CheckpointContents,
        Shard as Shard,
        Snapshot as Snapshot,
    )
    from .framework.checkpoint.writer import Save as Save, save as save
    from .framework.pretrained.weight_folder import fingerprint as fingerprint
    from .framework.storage.cached_url import url_of as url_of

_HOMES = {
    ".framework.checkpoint.convert.convert": "convert",
    ".framework.checkpoint.deletion": "clean_leftovers remove",
    ".framework.checkpoint.diff": "Difference diff",
    ".framework.checkpoint.finite_check": "has_nonfinite",
    ".framework.checkpoint.inspection": "Inspection Listed checkpoints inspect newest_good",
    ".framework.checkpoint.reader": "Checkpoint load open_checkpoint weights",
    ".framework.checkpoint.safetensors_export": "consolidate",
    ".framework.checkpoint.verify": "is_complete verify",
    ".framework.checkpoint.write_plan": "CheckpointContents Shard Snapshot",
    ".framework.checkpoint.writer": "Save save",
    ".framework.pretrained.weight_folder": "fingerprint",
    ".framework.storage.cached_url": "url_of",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES)
