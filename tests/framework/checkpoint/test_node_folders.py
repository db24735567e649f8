"""Checkpoints in the memory of several nodes, of which each rank here is one: what is left after nodes are lost."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_on_ranks

from phalanx.errors import StorageError
from phalanx.framework import checkpoint
from phalanx.framework.checkpoint.manifest import MANIFEST
from phalanx.framework.checkpoint.node_folders import NodeFolders, gather_newest
from phalanx.framework.checkpoint.reader import weights
from phalanx.framework.checkpoint.verify import is_complete, verify
from phalanx.framework.checkpoint.write_plan import CheckpointContents, Shard
from phalanx.framework.distributed.world import World

# Several pieces, which do not divide it.
ELEMENTS = 5_000_001


def content(rank: int, step: int) -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32) + 10 * rank + step


def saved(root: str, steps: Sequence[int], sharded: bool = True) -> tuple[World, NodeFolders, list[Path]]:
    """Save a part of each rank on a node of its own; under ``sharded=False`` all is written by rank 0."""
    world = World.from_environment("cpu")
    nodes = NodeFolders(world, Path(root) / f"node_{world.rank}")
    paths = []
    for step in steps:
        own = Shard(content(world.rank, step), (world.size, ELEMENTS), (world.rank, 0)) if sharded else None
        own = own and Shard(own.tensor[None], own.shape, own.offsets)
        shards = {"w": own or Shard.whole(content(0, step))}
        document = {"progress": {"global_step": step}}
        contents = CheckpointContents({"model": shards if sharded or world.is_global_zero else {}}, document)
        paths.append(checkpoint.save(nodes.folder / f"{step}.ckpt", contents, world, sharded, nodes=nodes))
    return world, nodes, paths


def values(path: Path, ranks: int, step: int, sharded: bool = True) -> bool:
    """Whether a checkpoint has the content that was saved, and is good in each byte."""
    found = weights(path)["w"]
    wanted = torch.stack([content(rank, step) for rank in range(ranks)]) if sharded else content(0, step)
    return torch.equal(found, wanted) and verify(path) == []


def files_of(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def held_after_a_save(root: str, sharded: bool) -> list[str]:
    _, _, paths = saved(root, [1], sharded)
    return files_of(paths[0])


def test_each_node_holds_its_part_and_that_of_the_one_before(tmp_path: Path) -> None:
    held = run_on_ranks(3, held_after_a_save, str(tmp_path / "parts"), True)
    names = [f"model-{rank:05d}.safetensors" for rank in range(3)]
    assert held == [sorted([names[rank], names[rank - 1], MANIFEST]) for rank in range(3)]
    # What one rank writes for all is held twice.
    held = run_on_ranks(3, held_after_a_save, str(tmp_path / "whole"), False)
    assert [len(files) for files in held] == [2, 2, 1]


def lose_folder(rank: int, lost: Sequence[int], paths: Sequence[Path]) -> None:
    if rank in lost:
        shutil.rmtree(paths[0].parent)


def damage_own_part(rank: int, lost: Sequence[int], paths: Sequence[Path]) -> None:
    if rank in lost:
        own = paths[-1] / f"model-{rank:05d}.safetensors"
        data = bytearray(own.read_bytes())
        data[-1] ^= 1
        own.write_bytes(data)


def cut_manifest(rank: int, lost: Sequence[int], paths: Sequence[Path]) -> None:
    if rank in lost:
        (paths[-1] / MANIFEST).write_bytes(b"")


def older_one_in_place(rank: int, lost: Sequence[int], paths: Sequence[Path]) -> None:
    """As if the node had been lost before it published the newest one, and had come back."""
    if rank in lost:
        shutil.rmtree(paths[-1])
        paths[0].rename(paths[-1])


def gathered(
    root: str, steps: Sequence[int], lose: Callable[..., None], lost: Sequence[int], sharded: bool
) -> tuple[list[int], list[str]]:
    """Return the steps of the checkpoints that are good on this node after a loss, and the notes."""
    world, nodes, paths = saved(root, steps, sharded)
    lose(world.rank, lost, paths)
    world.barrier()
    notes: list[str] = []
    gather_newest(world, nodes, notes.append)
    good = [step for step, path in zip(steps, paths, strict=True) if path.exists() and is_complete(path)]
    assert all(values(nodes.folder / f"{step}.ckpt", world.size, step, sharded) for step in good)
    return good, notes


@pytest.mark.parametrize(
    ("lose", "lost"),
    [
        *((lose_folder, [node]) for node in range(3)),
        *((damage_own_part, [1]), (cut_manifest, [0]), (older_one_in_place, [2])),
    ],
)
def test_all_nodes_have_the_newest_one_after_the_loss_of_one(
    tmp_path: Path, lose: Callable[..., None], lost: list[int]
) -> None:
    for good, notes in run_on_ranks(3, gathered, str(tmp_path), [1, 2], lose, lost, True):
        assert good[-1:] == [2]
        assert notes == []


def test_what_one_rank_writes_for_all_is_given_to_all(tmp_path: Path) -> None:
    for good, _ in run_on_ranks(3, gathered, str(tmp_path), [1], lose_folder, [1, 2], False):
        assert good == [1]


@pytest.mark.parametrize("lost", [[0, 1], [0, 2]])
def test_two_neighbours_that_are_lost_take_a_part_with_them(tmp_path: Path, lost: list[int]) -> None:
    (good, notes), *others = run_on_ranks(3, gathered, str(tmp_path), [1], lose_folder, lost, True)
    assert [good, *(good for good, _ in others)] == [[], [], []]
    (note,) = notes
    assert f"model-{lost[0] if lost != [0, 2] else 2:05d}.safetensors is on none of the nodes" in note


def test_an_older_one_is_taken_if_two_parts_of_the_newest_are_damaged(tmp_path: Path) -> None:
    for good, _ in run_on_ranks(3, gathered, str(tmp_path), [1, 2], damage_both_copies, [1], True):
        assert good == [1]


def damage_both_copies(rank: int, lost: Sequence[int], paths: Sequence[Path]) -> None:
    """Damage a part where it was written and where it was copied to."""
    for part in lost:
        if rank in (part, part + 1):
            (paths[-1] / f"model-{part:05d}.safetensors").write_bytes(b"damaged")


def without_room_for_a_copy(root: str) -> tuple[str, list[str], bool]:
    world, nodes, paths = saved(root, [1], sharded=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (ELEMENTS, limits[1]))
    try:
        contents = CheckpointContents({"model": {"w": Shard.whole(content(0, 2))} if world.is_global_zero else {}})
        with pytest.raises(StorageError) as refused:
            checkpoint.save(nodes.folder / "2.ckpt", contents, world, nodes=nodes)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    gather_newest(world, nodes, print)
    return str(refused.value), [each.name for each in nodes.folder.iterdir()], values(paths[0], world.size, 1, False)


def test_a_node_without_room_for_a_copy_fails_the_save_on_all(tmp_path: Path) -> None:
    for message, names, is_good in run_on_ranks(2, without_room_for_a_copy, str(tmp_path)):
        assert "2.ckpt' was not saved: rank 1: " in message
        assert is_good
        assert "1.ckpt" in names


def without_room_for_what_was_lost(root: str) -> tuple[bool, list[str], list[bool]]:
    world, nodes, paths = saved(root, [1, 2], sharded=True)
    lose_folder(world.rank, [1], paths)
    world.barrier()
    notes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=ELEMENTS))
        is_usable = gather_newest(world, nodes, notes.append)
    # What the others hold is there for another attempt, with another node.
    world.barrier()
    again = gather_newest(world, nodes, notes.append)
    return is_usable, notes, [again, *(values(path, world.size, 2) for path in paths[1:])]


def test_a_node_without_room_takes_nothing_from_the_others(tmp_path: Path) -> None:
    for is_usable, notes, goods in run_on_ranks(3, without_room_for_what_was_lost, str(tmp_path)):
        assert not is_usable
        assert all("rank 1: it needs 60,00" in note for note in notes)
        assert all(goods)


def on_one_node(root: str) -> list[Any]:
    world = World.from_environment("cpu")
    nodes = NodeFolders(world, Path(root))
    gather_newest(world, nodes, print)
    return [nodes.are_several, nodes.leader, nodes.leads]


def test_ranks_of_one_node_share_its_folder(tmp_path: Path) -> None:
    assert run_on_ranks(2, on_one_node, str(tmp_path)) == [[False, 0, True], [False, 0, False]]
