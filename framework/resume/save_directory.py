"""A directory that a run saves into, made ready before the first step: cleaned, tried, and its room looked at."""

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
    """Get a directory ready for checkpoints of the names that ``gives`` knows. Collective.

    What killed saves left in it is deleted, as far as it could be this run's and its writer is dead; the run's own
    directory was cleaned when its lock was taken. Too little room is told of.

    Raises:
        StorageError: on all ranks; a checkpoint could not be saved in it.
        ConfigurationError: there is a state that no checkpoint can keep.
    """
    saver = run.saver
    if not weights_only:
        check_state(run)
    if run.world.is_global_zero and directory != Path(os.path.abspath(run.directory.checkpoints)):
        clean_shared(directory, lambda name: name == NAME or is_name(name) or gives(name), run.note)
    probe(directory, run.world, saver.sharded)
    size, free = saver.estimate(weights_only), free_bytes(directory)
    if free is not None and free < size:
        run.note(f"A checkpoint takes about {size:,} bytes, and {free:,} are free in {directory}: make room.")
    if asynchronous:
        saver.prepare(size // run.world.size if saver.sharded else size)
