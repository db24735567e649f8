"""Checkpoint storage: atomic, verified, with the same format under every strategy. Nothing in it pickles or unpickles.

A checkpoint is a directory of safetensors files and a ``manifest.json``; the page "The checkpoint format" of the docs
describes every byte. Strategies write with ``save`` and read slices through ``open_checkpoint``. What users call is
gathered in ``phalanx.checkpoint``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .codec import decode as decode
    from .inspect_manifest import kind_of as kind_of
    from .latest import newest_good as newest_good
    from .manifest_file import read_manifest as read_manifest
    from .reader import open_checkpoint as open_checkpoint
    from .stale_files import clean_own as clean_own
    from .stale_files import clean_shared as clean_shared
    from .stored_tensor import held as held
    from .writer import save as save

_HOMES = {
    "clean_own": ".stale_files",
    "clean_shared": ".stale_files",
    "decode": ".codec",
    "held": ".stored_tensor",
    "kind_of": ".inspect_manifest",
    "newest_good": ".latest",
    "open_checkpoint": ".reader",
    "read_manifest": ".manifest_file",
    "save": ".writer",
}

__getattr__ = on_call(__name__, _HOMES)
