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
    from .listing import furthest as furthest, newest_complete as newest_complete, newest_good as newest_good
    from .manifest_file import read_manifest as read_manifest
    from .reader import open_checkpoint as open_checkpoint
    from .stale_files import clean_own as clean_own, clean_shared as clean_shared
    from .stored_tensor import held as held
    from .writer import save as save

_HOMES = {
    ".codec": "decode",
    ".inspect_manifest": "kind_of",
    ".listing": "furthest newest_complete newest_good",
    ".manifest_file": "read_manifest",
    ".reader": "open_checkpoint",
    ".stale_files": "clean_own clean_shared",
    ".stored_tensor": "held",
    ".writer": "save",
}

__getattr__ = on_call(__name__, _HOMES)
