"""Preparation of a checkpoint directory before the first step: clean-up, a test of writing, and a check of space.

The test does every operation of a save, with a few bytes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ..checkpoint.deletion import clean_shared
from ..checkpoint.writer import error_of, gather_or_raise, outcome_of
from ..core.errors import StorageError
from ..core.size_text import size_text
from ..distributed.world import World
from ..run.run import Run
from ..system.atomic_directories import HiddenDirectory, delete_hidden, remove_tree
from ..system.atomic_files import free_bytes, hidden_sibling, make_directory, write_synced
from .capture import check_state
from .preempted_save import is_name

NAME = "probe"
"""The base name of hidden probe directories, by which leftovers of a killed process are recognized."""


def probe(directory: Path, world: World, sharded: bool) -> None:
    """Create a directory if it is missing, and test creating, writing, syncing, renaming and deleting in it.
    Collective.

    With ``sharded``, every rank writes, as in a sharded save.

    Raises:
        StorageError: an operation failed on some rank. Raised on all ranks.
    """
    what = f"checkpoints cannot be saved in {str(directory)!r}"
    held: list[HiddenDirectory] = []
    try:
        failure = _attempt(lambda: _open(directory, held)) if world.is_global_zero else None
        place: Path = gather_or_raise(world, failure, directory, what, held[0].path if held else None)[0]
        writes = sharded or world.is_global_zero
        part = place / f"probe-{world.rank:05d}.safetensors"
        failure = _attempt(lambda: write_synced(part, b"phalanx")) if writes else None
        gather_or_raise(world, failure, directory, what)
        failure = _attempt(lambda: _rename_and_delete(place)) if world.is_global_zero else None
        outcome = world.broadcast_object(outcome_of(failure, directory))
        error = error_of([outcome], what, world.size)
        if error is not None:
            raise error from failure
    finally:
        for one in held:
            with contextlib.suppress(StorageError):
                if one.path.is_dir():
                    remove_tree(one.path)
            one.release()


def _attempt(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error
    return None


def _open(directory: Path, held: list[HiddenDirectory]) -> None:
    make_directory(directory)
    held.append(HiddenDirectory(directory / NAME))


def _rename_and_delete(place: Path) -> None:
    hidden = hidden_sibling(place.parent / NAME, "gone")
    os.rename(place, hidden)
    delete_hidden(hidden)


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
        run.note(
            f"A checkpoint takes about {size_text(size)}, and {size_text(free)} are free in {directory}: free some "
            "space."
        )
    if asynchronous:
        saver.prepare(size // run.world.size if saver.sharded else size)
