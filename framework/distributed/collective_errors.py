"""What every rank does by itself and all have to have done: where one fails, all raise, and none waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from ..checkpoint.reader import Checkpoint, open_checkpoint
from ..checkpoint.verify import problems_of
from ..core.errors import CheckpointError, PhalanxError
from .world import World

T = TypeVar("T")


def on_all_ranks(world: World, function: Callable[[], T]) -> T:
    """Run a function that holds no collective on every rank; where it fails on any, all raise. Collective.

    Raises:
        CheckpointError: a rank could not read what it looked for.
        PhalanxError: what the function raised, on whatever rank.
    """
    result: T | None = None
    failure: PhalanxError | None = None
    try:
        result = function()
    except PhalanxError as error:
        failure = error
    except OSError as error:
        failure = CheckpointError(f"the checkpoint cannot be read: {error}.")
    failures = {rank: one for rank, one in enumerate(world.all_gather_object(failure)) if one is not None}
    if failure is not None and len(failures) == world.size:
        raise failure
    for rank, one in failures.items():
        raise type(one)(f"rank {rank} of {world.size}: {one}") from failure
    return cast(T, result)


def open_everywhere(world: World, path: object, verified: bool = False) -> Checkpoint:
    """Open the same checkpoint on all ranks, once every byte of it was found good. Collective.

    The ranks share the files out among them to read them, unless they are ``verified`` already.

    Raises:
        CheckpointError: on all ranks; one has none there, a damaged one, or another one. The message names file and
            tensor.
    """
    checkpoint = on_all_ranks(world, lambda: open_checkpoint(str(path)))
    every = world.all_gather_object(checkpoint.manifest.checksum)
    other = next((rank for rank, one in enumerate(every) if one != every[0]), None)
    if other is not None:
        raise CheckpointError(
            f"{checkpoint.path} is another checkpoint on rank {other} than on rank 0: give a path that all machines "
            "share, or copy the one checkpoint to each."
        )
    if not verified:
        _verify_together(world, checkpoint)
    return checkpoint


def _verify_together(world: World, checkpoint: Checkpoint) -> None:
    manifest = checkpoint.manifest
    by_size = sorted(manifest.files, key=lambda name: (-manifest.files[name].size, name))
    mine = problems_of(checkpoint.path, manifest, by_size[world.rank :: world.size])
    problems = [problem for found in world.all_gather_object(mine) for problem in found]
    if problems:
        more = f" That is the first of {len(problems)} problems." if len(problems) > 1 else ""
        raise CheckpointError(
            f"checkpoint {str(checkpoint.path)!r} is refused: {problems[0]}{more} Give another one, or "
            "ckpt_path='auto' for the newest good one of the run."
        )
