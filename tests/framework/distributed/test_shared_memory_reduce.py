"""Sums over the ranks of a node through shared memory: exact, in order, and nothing stays behind."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks
from torch import Tensor

from phalanx.framework.core.errors import DesyncError, RankError
from phalanx.framework.distributed import shared_memory_reduce as board_module
from phalanx.framework.distributed.shared_memory_reduce import CAPACITY, Board, Node, SharedMemory
from phalanx.framework.distributed.world import World


def numbers(rank: int, number: int, count: int = 7) -> list[float]:
    return [each * (rank + 1) + number * 0.1 for each in range(count)]


def open_boards() -> int:
    """Count this process's open files of boards: connections come and go on threads of their own."""
    places = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.lexists(place) and "phalanx-board" in os.readlink(place) for place in places)


def many(rounds: int, late: bool) -> bool:
    """Reduce many times, with two open at a time and ranks that are late at random."""
    world = World.from_environment("cpu")
    draw = random.Random(world.rank)
    assert world.control is not None
    assert world._board
    boards = open_boards()
    before, earlier = None, 0
    for number in range(rounds):
        pending = world.control_reduce(numbers(world.rank, number))
        if before is not None:
            expected = [sum(each) for each in zip(*(numbers(rank, earlier) for rank in range(world.size)), strict=True)]
            assert list(before.wait()) == expected
        before, earlier = pending, number
        if late and draw.random() < 0.02:
            time.sleep(0.002)
    assert before is not None
    before.wait()
    assert before.is_completed()
    assert open_boards() == boards
    world.close()
    assert not world._board
    return True


@pytest.mark.parametrize(("ranks", "late"), [(2, False), (3, True)])
def test_sums_of_many_reductions_are_exact(ranks: int, late: bool) -> None:
    assert all(run_on_ranks(ranks, many, 600, late))


def through_gloo(what: str) -> list[float]:
    world = World.from_environment("cpu")
    with pytest.MonkeyPatch.context() as patch:
        if what == "no memory" and world.rank == 1:
            patch.setattr(SharedMemory, "__init__", _fails)
        assert world.control is not None
    assert bool(world._board) == (what == "long")
    found = world.control_reduce([world.rank + 1.0] * (CAPACITY + 1)).wait()
    world.close()
    return sorted(set(found))


def _fails(*_: Any) -> None:
    raise OSError("no memory")


@pytest.mark.parametrize("what", ["long", "no memory"])
def test_long_vectors_and_ranks_without_shared_memory_go_through_gloo(what: str) -> None:
    assert run_on_ranks(2, through_gloo, what) == [[3.0], [3.0]]


# ---- tensors ---------------------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64)


def tensor_of(rank: int, number: int) -> Tensor:
    """Return a tensor of a rank, whose shape and dtype depend on the number alone."""
    shape = (number % 5, 1 + number * 7 % 300)
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 9).to(DTYPES[number % len(DTYPES)])


def many_tensors(rounds: int) -> bool:
    """Add tensors of all sizes and dtypes, with ranks that are late at random, and controls in between."""
    world = World.from_environment("cpu")
    draw = random.Random(world.rank)
    for number in range(rounds):
        factor = 1.0 / world.size if number % 2 and DTYPES[number % len(DTYPES)].is_floating_point else 1.0
        parts = [tensor_of(rank, number) for rank in range(world.size)]
        if factor != 1.0:
            parts = [part * factor for part in parts]
        expected = parts[0]
        for part in parts[1:]:
            expected = expected + part
        with torch.inference_mode(number % 3 == 0):
            given = tensor_of(world.rank, number)
        pending = world.control_reduce([1.0])
        assert world.sum_in_memory(given, factor)
        assert given.dtype == expected.dtype
        assert torch.equal(given, expected)
        assert list(pending.wait()) == [float(world.size)]
        if draw.random() < 0.05:
            time.sleep(0.002)
    world.close()
    return True


def test_sums_of_tensors_are_those_of_the_ranks_in_turn() -> None:
    assert all(run_on_ranks(3, many_tensors, 300))


def sums_over_gloo() -> list[bool]:
    world = World.from_environment("cpu")
    in_memory, found = [], []
    for tensor in (torch.ones(2, 2), torch.ones(3, dtype=torch.bool), torch.ones(3 << 20)):
        in_memory.append(world.sum_in_memory(tensor.clone()))
        if tensor.dtype is not torch.bool:
            found.append(world.all_reduce(tensor.clone(), "mean").sum().item() == tensor.numel())
    world.close()
    return [*in_memory, all(found)]


def test_tensors_that_do_not_fit_go_over_gloo() -> None:
    assert run_on_ranks(2, sums_over_gloo) == [[True, False, False, True]] * 2


def sum_of_layouts() -> Tensor:
    """Sum a matrix that is transposed on rank 1 alone."""
    world = World.from_environment("cpu")
    given = torch.arange(6.0).reshape(2, 3)
    given = given if world.rank == 0 else given.t().contiguous().t()
    world.all_reduce(given)
    world.close()
    return given


def test_the_memory_layout_may_differ_by_rank() -> None:
    for found in run_on_ranks(2, sum_of_layouts):
        torch.testing.assert_close(found, 2.0 * torch.arange(6.0).reshape(2, 3), rtol=0.0, atol=0.0)


def different_tensors(dtypes: bool) -> str:
    world = World.from_environment("cpu")
    try:
        if dtypes:
            world.all_reduce(torch.ones(2 - world.rank, dtype=(torch.float32, torch.float64)[world.rank]))
        else:
            world.sum_in_memory(torch.ones(2 + world.rank))
    except DesyncError as error:
        return str(error)
    finally:
        world.barrier()
        world.close()
    return ""


def test_ranks_that_add_different_tensors_are_reported() -> None:
    first, second = run_on_ranks(2, different_tensors, False)
    assert "rank 1 adds 12 bytes" in first
    assert "rank 0 adds 8 bytes" in second
    first, second = run_on_ranks(2, different_tensors, True)
    assert "rank 1 adds 8 bytes of torch.float64" in first
    assert "rank 0 adds 8 bytes of torch.float32" in second


# ---- one process that plays all ranks --------------------------------------------------------------------------------


def node_of(pids: list[int]) -> Node:
    return Node(range(len(pids)), pids, len(pids))


def boards(pids: list[int]) -> list[Board]:
    memory = SharedMemory(Board.size(len(pids)))
    made = [Board(memory, rank, node_of(pids)) for rank in range(len(pids))]
    memory.release_name()
    return made


def test_a_rank_that_lags_behind_raises_and_never_sums_newer_numbers() -> None:
    first, second = boards([os.getpid()] * 2)
    pending = first.post(numbers(0, 0))
    for number in range(9):
        second.post(numbers(1, number))
    with refuses(DesyncError, "rank 1", "rank 0"):
        pending.wait()


def test_ranks_that_reduce_different_numbers_are_reported() -> None:
    first, second = boards([os.getpid()] * 2)
    second.post([0.0] * 3)
    with refuses(DesyncError, "rank 1", "3 numbers"):
        first.post([0.0] * 2).wait()


def test_what_is_half_written_is_not_read() -> None:
    first, second = boards([os.getpid()] * 2)
    second.post([1.0] * 4)
    start = second._starts[1][1]
    second._bytes[start + board_module._HEAD.size] ^= 1
    assert first.look(1, 1, 4) is None
    second._bytes[start + board_module._HEAD.size] ^= 1
    assert first.look(1, 1, 4) == (1.0,) * 4


def test_a_rank_that_has_left_is_named_at_once_but_what_it_wrote_counts() -> None:
    memory = SharedMemory(Board.size(2))
    theirs = SharedMemory(Board.size(2), memory.place)
    memory.release_name()
    theirs.release_name()
    node = node_of([os.getpid()] * 2)
    first, second = Board(memory, 0, node), Board(theirs, 1, node)
    pending = first.post(numbers(0, 0))
    second.post(numbers(1, 0))
    second.close()
    assert pending.wait()
    with refuses(RankError, "rank 1", "rank 0"):
        first.post(numbers(0, 1)).wait()


def test_the_end_of_a_forked_child_is_not_that_of_its_rank() -> None:
    first, second = boards([os.getpid()] * 2)
    child = os.fork()
    if not child:
        first.close()
        os._exit(0)
    os.waitpid(child, 0)
    pending = second.post(numbers(1, 0))
    late = threading.Timer(0.1, lambda: first.post(numbers(0, 0)))
    late.start()
    assert list(pending.wait()) == [sum(each) for each in zip(numbers(0, 0), numbers(1, 0), strict=True)]
    late.join()


def test_a_rank_whose_process_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    monkeypatch.setattr(board_module, "_ASK_SECONDS", 0.01)
    first, _ = boards([os.getpid(), child])
    with refuses(RankError, f"rank 1 (pid {child})"):
        first.post([0.0]).wait()
