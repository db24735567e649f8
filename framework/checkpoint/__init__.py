"""Checkpoint storage: atomic, verified, with the same format under every strategy. No checkpoint holds a pickle.

A checkpoint is a directory of safetensors files and a ``manifest.json``; the page "The checkpoint format" of the docs
describes every byte. What users call is gathered in ``phalanx.checkpoint``.

    write_plan         the contents of a checkpoint, and the rank that writes each piece
    writer, staging    saves: files, manifest, publication; copies for saves behind training
    reader, verify     reading of slices, verification of every byte
    manifest, codec    the format: the manifest, and values other than tensors
    safetensors_*      the format of tensor files, and plain ones for other programs
    inspection         description, list and search of checkpoints
    retention          names, and which checkpoints a run keeps
    deletion           of checkpoints, and of what killed processes left
    save_request       one save of a run, and what follows it
    snapshot_slots     the directories and intervals of snapshots in memory
    node_folders       checkpoints on several nodes without a common disk
    host_memory        copies of tensors from a GPU
    finite_check       for NaN and infinity
    fingerprint, diff  comparison of checkpoints
    convert            from files of other libraries, whose pickles are read safely unless the user trusts them

The functions below are imported when they are first called: a process that reads a checkpoint loads no writer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .codec import decode as decode
    from .deletion import clean_own as clean_own, clean_shared as clean_shared
    from .inspection import (
        furthest as furthest,
        kind_of as kind_of,
        newest_complete as newest_complete,
        newest_good as newest_good,
    )
    from .manifest import read_manifest as read_manifest
    from .reader import held as held, open_checkpoint as open_checkpoint
    from .writer import save as save

_HOMES = {
    ".codec": "decode",
    ".deletion": "clean_own clean_shared",
    ".inspection": "furthest kind_of newest_complete newest_good",
    ".manifest": "read_manifest",
    ".reader": "held open_checkpoint",
    ".writer": "save",
}

__getattr__ = on_call(__name__, _HOMES)
