"""Sums over the ranks of several nodes: equal on all ranks to the last bit, and never led by one of them.

The nodes are on one machine: each rank is told which node it is on.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from models import Regressor, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch.utils.data import DataLoader

from phalanx.framework.core.errors import DesyncError, RankError
from phalanx.framework.distributed import node_board, world as world_module
from phalanx.framework.distributed.shared_memory_reduce import Board, SharedMemory
from phalanx.framework.distributed.world import Pending, World

BLOCKS, CYCLIC, UNEVEN, PAIR_AND_ONE = (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1, 1, 1), (0, 0, 1)


def world_on(nodes: Sequence[int]) -> World:
    """Return the world of this rank, on the node that ``nodes`` has for its rank. Collective."""
    world = World.from_environment("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_board, "this_node", lambda: (str(nodes[world.rank]),))
        assert world.control is not None
    return world


def numbers(rank: int, number: int) -> list[float]:
    return [each * 0.1 * (rank + 1) + number / 3 for each in range(11)]


def total(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]


def native_threads() -> int:
    """Count the threads of this process.

    Not those with the name that gloo gives its own: a thread names itself, which may be long after its start.
    """
    return len(os.listdir("/proc/self/task"))


# Written by hand: the ranks that sum over gloo.
COLUMNS = {CYCLIC: [[0, 1], [2, 3]], UNEVEN: [[0, 2, 4], [1, 3]]}


def many(nodes: tuple[int, ...], rounds: int) -> list[str]:
    """Reduce many times, with two open at a time and ranks that are late at random; return the bits of all sums."""
    # A process keeps what the first world starts for all of them.
    world_on(nodes).close()
    before = native_threads()
    world = world_on(nodes)
    assert world._board
    draw = random.Random(world.rank)
    opened: list[Pending] = []
    bits = []
    for number in range(rounds + 1):
        if number < rounds:
            opened.append(world.control_reduce(numbers(world.rank, number)))
        if number:
            pending = opened.pop(0)
            found = list(pending.wait())
            assert pending.is_completed()
            parts = [total([numbers(rank, number - 1) for rank in column]) for column in COLUMNS[nodes]]
            # Two numbers have one sum; three may be added in any order.
            assert found == (pytest.approx(total(parts), rel=1e-15, abs=0) if nodes == UNEVEN else total(parts))
            bits += [each.hex() for each in found]
        if draw.random() < 0.05:
            time.sleep(0.002)
    world.barrier()
    world.close()
    # It keeps the connections of its reduction.
    del pending
    assert native_threads() == before
    return bits


@pytest.mark.parametrize("nodes", [CYCLIC, UNEVEN])
def test_sums_over_nodes_are_the_same_bits_on_all_ranks(nodes: tuple[int, ...]) -> None:
    first, *others = run_on_ranks(len(nodes), many, nodes, 150)
    assert all(other == first for other in others)


def alone() -> tuple[bool, list[float]]:
    world = world_on(PAIR_AND_ONE)
    sums = world.control_reduce(numbers(world.rank, 0)).wait()
    has_board = bool(world._board)
    world.close()
    return has_board, list(sums)


def test_a_node_with_one_rank_beside_others_leaves_the_sums_to_gloo() -> None:
    expected = total([numbers(rank, 0) for rank in range(3)])
    for has_board, sums in run_on_ranks(3, alone):
        assert not has_board
        assert sums == pytest.approx(expected, rel=1e-15, abs=0)


def without_memory() -> tuple[bool, list[float]]:
    """Refuse the memory to one rank, of the second node."""
    with pytest.MonkeyPatch.context() as patch:
        if World.from_environment("cpu").rank == 3:
            patch.setattr(SharedMemory, "__init__", _fails)
        world = world_on(BLOCKS)
    sums = world.control_reduce(numbers(world.rank, 0)).wait()
    has_board = bool(world._board)
    world.close()
    return has_board, list(sums)


def _fails(*_: object) -> None:
    raise OSError("no memory")


def test_all_nodes_leave_the_sums_to_gloo_if_one_rank_has_no_memory() -> None:
    results = run_on_ranks(4, without_memory)
    assert [has_board for has_board, _ in results] == [False] * 4
    assert all(sums == results[0][1] for _, sums in results)


def while_one_rank_is_busy(busy: int) -> bool:
    """Sum on all ranks but one, which reads its sum only once all others have theirs."""
    world = world_on(BLOCKS)
    pending = world.control_reduce(numbers(world.rank, 0))
    if world.rank == busy:
        world.barrier()
        pending.wait()
    else:
        pending.wait()
        world.barrier()
    world.barrier()
    world.close()
    return True


@pytest.mark.parametrize("busy", range(4))
def test_a_rank_that_does_not_wait_yet_keeps_no_other_waiting(busy: int) -> None:
    assert all(run_on_ranks(4, while_one_rank_is_busy, busy, timeout=20))


def one_leaves() -> str:
    """Return the error of each rank after rank 3 has left."""
    world = world_on(BLOCKS)
    world.barrier()
    try:
        if world.rank < 3:
            world.control_reduce(numbers(world.rank, 0)).wait()
    except (RankError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        world._board.pop().close()
    return ""


def test_a_rank_that_has_left_ends_the_sums_of_all_nodes() -> None:
    first, second, third, fourth = run_on_ranks(4, one_leaves)
    assert second.startswith("RuntimeError") or "DistBackendError" in second
    assert "rank 1 (pid" in first
    assert "has left, and rank 0 waits for it" in first
    assert "has left, and rank 2 waits for it" in third
    assert fourth == ""


def at_different_reductions() -> str:
    world = world_on(BLOCKS)
    try:
        world.control_reduce([1.0] * (2 + (world.rank in (1, 3)))).wait()
    except DesyncError as error:
        return str(error)
    finally:
        world.barrier()
        world.close()
    return ""


def test_columns_that_sum_different_numbers_are_reported() -> None:
    messages = run_on_ranks(4, at_different_reductions)
    assert [message.partition(":")[0] for message in messages] == [
        f"rank {other} reduces {theirs} numbers where this rank {rank} reduces {own}"
        for rank, own, other, theirs in ((0, 2, 1, 3), (1, 3, 0, 2), (2, 2, 3, 3), (3, 3, 2, 2))
    ]


def fitted(strategy: str, nodes: tuple[int, ...]) -> list[float]:
    boards: list[Board | None] = []

    def share_board(group: dist.ProcessGroup) -> Board | None:
        boards.append(node_board.share_board(group))
        return boards[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_board, "this_node", lambda: (str(nodes[dist.get_rank()]),))
        patch.setattr(world_module, "share_board", share_board)
        trainer = silent_trainer(devices=4, strategy=strategy, max_epochs=2, accumulate_grad_batches=2)
        # 13 batches: rank 0 has one more than the others.
        trainer.fit(model := Regressor(), DataLoader(regression_data(26), batch_size=2, shuffle=True))
    assert len(boards) == 1
    assert boards[0] is not None
    # Under fsdp, rank 0 alone gets whole weights.
    weights: list[float] = weights_of(model).tolist() if trainer.is_global_zero else []
    return weights


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_fit_on_two_nodes_equals_one_on_a_single_node(strategy: str) -> None:
    several, single = (torch.tensor(run_on_ranks(4, fitted, strategy, nodes)[0]) for nodes in (BLOCKS, (0, 0, 0, 0)))
    if strategy == "ddp":
        # The ranks of one node add gradients in the order of ranks, and gloo in a ring: sums of four round differently.
        torch.testing.assert_close(several, single)
    else:
        assert several.tolist() == single.tolist()
