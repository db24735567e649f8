"""Preparation of a checkpoint directory before the first step: clean-up, a test of writing, and a check of space."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ..checkpoint.directory_probe import NAME, probe
from ..checkpoint.stale_files import clean_shared
from ..run.run import Run
from ..system.atomic_files import free_bytes
from .capture import check_state
from .preempted_save import is_name


def make_ready(run: Run, directory: Path, gives: Callable[[str], bool], weights_only: bool, asynchronous: bool) -> None:
    """Prepare a directory for checkpoints whose names ``gives`` recognizes. Collective.

    Leftovers of killed saves are deleted if they may belong to this run and their writer is dead; the run's own
    directory was cleaned when its lock was acquired. Too little free space is reported.

    Raises:
        StorageError: on all ranks; a checkpoint could not be saved in the directory.
        ConfigurationError: a state has a type that no checkpoint can hold.
    """
    saver = run.saver
    if not weights_only:
        check_state(run)
    if run.world.is_global_zero and directory != Path(os.path.abspath(run.directory.checkpoints)):
        clean_shared(directory, lambda name: name == NAME or is_name(name) or gives(name), run.note)
    probe(directory, run.world, saver.sharded)
    size, free = saver.estimate(weights_only), free_bytes(directory)
    if free is not None and free < size:
        run.note(f"A checkpoint takes about {size:,} bytes, and {free:,} are free in {directory}: free some space.")
    if asynchronous:
        saver.prepare(size // run.world.size if saver.sharded else size)
