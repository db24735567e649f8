"""Opening of the same checkpoint on all ranks, with verification shared by the ranks."""

from __future__ import annotations

from ..core.errors import CheckpointError
from ..distributed.collective_errors import on_all_ranks
from ..distributed.world import World
from .reader import Checkpoint, open_checkpoint
from .verify import problems_of


def open_on_all_ranks(world: World, path: object, verified: bool = False) -> Checkpoint:
    """Verify every byte of a checkpoint and open it on all ranks. Collective.

    The ranks divide the files among them for verification, unless they are already ``verified``.

    Raises:
        CheckpointError: the checkpoint is missing, damaged or a different one on some rank. Raised on all ranks; the
            message names file and tensor.
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
