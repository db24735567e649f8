"""Test of a checkpoint directory before the first step: every operation of a save, with a few bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from ..core.errors import StorageError
from ..distributed.world import World
from ..system.atomic_directories import HiddenDirectory, delete_hidden, remove_tree
from ..system.atomic_files import hidden_sibling, make_directory, write_synced
from .save_errors import error_of, gather_or_raise, outcome_of

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
        failure = _attempt(lambda: write_synced(place / _part(world.rank), b"phalanx")) if writes else None
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


def _part(rank: int) -> str:
    return f"probe-{rank:05d}.safetensors"


def _rename_and_delete(place: Path) -> None:
    hidden = hidden_sibling(place.parent / NAME, "gone")
    os.rename(place, hidden)
    delete_hidden(hidden)
