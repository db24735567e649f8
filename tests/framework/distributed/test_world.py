"""Where a process stands, and what ranks tell one another."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from messages import refuses
from ranks import run_on_ranks
from torch.profiler import ProfilerActivity, profile

from phalanx.framework.core.errors import ConfigurationError, StorageError, UnknownNameError
from phalanx.framework.distributed.collective_errors import on_rank_zero
from phalanx.framework.distributed.world import World, placement
from phalanx.framework.system.environment import rank_environment
from phalanx.framework.system.launcher_env import Placement, check_devices, first_host, read_placement

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[07-08],login1",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x1),3",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    # The place on the node, which is easily taken for the node's.
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29500",
}


def without(variables: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without a launcher's variables."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "OMPI_", "MASTER_", "PHALANX_")) or name in TORCHRUN:
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Placement()),
        ({"RANK": "", "WORLD_SIZE": ""}, Placement()),
        (TORCHRUN, Placement(5, 8, 1, 4, 1, 2, "head", 29500, "torchrun")),
        (TORCHRUN | {"PHALANX_ERROR_DIR": "/tmp/x"}, Placement(5, 8, 1, 4, 1, 2, "head", 29500, "phalanx")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Placement(launcher="torchrun")),
        (
            without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
            Placement(5, 8, 5, 8, 0, 1, "head", 29500, "torchrun"),
        ),
        (SLURM, Placement(5, 7, 1, 3, 1, 2, "gpu07", 23456, "slurm", "123456..")),
        (SLURM | {"SLURM_JOB_NAME": "bash"}, Placement()),
        (SLURM | {"SLURM_JOB_NAME": "interactive"}, Placement()),
        # In a batch script outside srun the tasks of the job are known, but this is not one of them.
        (without(SLURM, "SLURM_STEP_NODELIST"), Placement()),
        (OPEN_MPI, Placement(3, 4, 1, 2, 1, 2, "head", 29500, "mpi")),
        (OPEN_MPI | {"PMIX_NAMESPACE": "prte-7"}, Placement(3, 4, 1, 2, 1, 2, "head", 29500, "mpi", "prte-7")),
        (SLURM | TORCHRUN, Placement(5, 8, 1, 4, 1, 2, "head", 29500, "torchrun")),
        (OPEN_MPI | SLURM, Placement(5, 7, 1, 3, 1, 2, "head", 29500, "slurm", "123456..")),
    ],
)
def test_the_variables_of_every_launcher_are_understood(variables: dict[str, str], expected: Placement) -> None:
    assert read_placement(variables) == expected


def test_ranks_spread_over_the_nodes_asked_for_where_the_launcher_is_silent() -> None:
    silent = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    place = read_placement(silent, num_nodes=2)
    assert (place.local_rank, place.local_size, place.node_rank, place.num_nodes) == (1, 4, 1, 2)


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
        ({"RANK": "0"}, "RANK=0"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one'"),
        (TORCHRUN | {"RANK": "8"}, "rank 8"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT"),
        (without(OPEN_MPI, "MASTER_ADDR", "MASTER_PORT"), "MASTER_ADDR"),
    ],
)
def test_variables_that_contradict_get_a_sentence(variables: dict[str, str], name: str) -> None:
    with refuses(ConfigurationError, name):
        read_placement(variables)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("tux", "tux"),
        ("tux,other", "tux"),
        ("gpu[07-12],login", "gpu07"),
        ("gpu[3,5-6]", "gpu3"),
        ("rack[1-2]n[03-04]", "rack1n03"),
    ],
)
def test_the_first_host_of_a_compact_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("launcher", "name"),
    [
        ("torchrun", "--nproc-per-node=4"),
        ("slurm", "--ntasks-per-node=4"),
        (None, "devices=4"),
    ],
)
def test_devices_that_were_not_started_are_refused(launcher: Any, name: str) -> None:
    with refuses(ConfigurationError, name):
        check_devices(4, Placement(size=2, local_size=2, launcher=launcher))


def test_devices_that_were_started_or_can_be_are_accepted() -> None:
    check_devices(2, Placement(size=2, local_size=2, launcher="torchrun"))
    check_devices(4, Placement())
    with refuses(ConfigurationError, "num_nodes=1"):
        check_devices(2, Placement(size=4, local_size=2, num_nodes=2, launcher="torchrun"))


def test_placement_reads_this_process_and_changes_nothing(launched: pytest.MonkeyPatch) -> None:
    before = dict(os.environ)
    assert placement() == Placement()
    for name, value in TORCHRUN.items():
        launched.setenv(name, value)
    assert placement().rank == 5
    assert dict(os.environ) == before | TORCHRUN
    assert not dist.is_initialized()


def test_a_ranks_environment_keeps_the_users_and_drops_another_launchers(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    launched.setenv("MINE", "kept")
    launched.delenv("OMP_NUM_THREADS", raising=False)
    place = Placement(1, 2, 1, 2, 0, 1, "127.0.0.1", 4321)
    environment = rank_environment(place, store_fd=None, error_dir="/errors", threads=3)
    assert read_placement(environment) == replace(place, launcher="phalanx")
    assert environment["MINE"] == "kept"
    assert environment["OMP_NUM_THREADS"] == "3"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environment
    launched.setenv("OMP_NUM_THREADS", "7")
    assert rank_environment(place, 5, "/errors", threads=3)["OMP_NUM_THREADS"] == "7"


def test_one_process_is_a_world_whose_collectives_are_identities(launched: pytest.MonkeyPatch) -> None:
    world = World.from_environment("cpu")
    tensor, obj = torch.tensor([1.0, 2.0]), {"a": 1}
    assert world.is_global_zero
    assert (world.rank, world.size, world.local_rank, world.num_nodes) == (0, 1, 0, 1)
    assert world.all_reduce(tensor, "mean") is tensor
    assert world.broadcast(tensor) is tensor
    assert world.all_gather(tensor).tolist() == [[1.0, 2.0]]
    assert world.broadcast_object(obj) is obj
    assert world.all_gather_object(obj)[0] is obj
    assert world.control_reduce([1.0, 2.0]).is_completed()
    assert world.control_reduce([1.0, 2.0]).wait() == [1.0, 2.0]
    world.barrier()
    world.close()
    assert tensor.tolist() == [1.0, 2.0]
    assert not dist.is_initialized()
    with refuses(ConfigurationError, "control group"):
        _ = world.control


def test_one_rank_of_torchrun_builds_no_group(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("RANK", "0")
    launched.setenv("WORLD_SIZE", "1")
    assert World.from_environment("cpu").size == 1
    assert not dist.is_initialized()


def test_a_reduction_that_is_not_known_is_refused_in_one_process_too() -> None:
    world = World.single("cpu")
    with refuses(UnknownNameError, "'meen'", "'mean'"):
        world.all_reduce(torch.ones(1), "meen")  # type: ignore[arg-type]
    with refuses(ConfigurationError, "torch.int64"):
        world.all_reduce(torch.ones(1, dtype=torch.int64), "mean")


def tensors_travel() -> None:
    world = World.from_environment("cpu")
    rank, size = world.rank, world.size
    assert (world.local_rank, world.local_size, world.device.type) == (rank, size, "cpu")
    values = {"sum": sum(range(size)), "mean": (size - 1) / 2, "min": 0, "max": size - 1}
    for op, value in values.items():
        tensor = torch.full((2,), float(rank))
        assert world.all_reduce(tensor, op) is tensor  # type: ignore[arg-type]
        assert tensor.tolist() == [value, value]
    gathered = world.all_gather(torch.full((2, 1), rank).t())
    assert gathered.tolist() == [[[other, other]] for other in range(size)]
    assert world.all_gather(torch.tensor(rank == 1)).tolist() == [other == 1 for other in range(size)]
    assert world.all_gather(torch.empty(0, 3)).shape == (size, 0, 3)
    assert world.broadcast(torch.tensor(rank), src=1).item() == 1
    work = world.control_reduce([1.0, float(rank)])
    assert list(work.wait()) == [size, sum(range(size))]
    assert work.is_completed()
    world.barrier()
    world.close()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tensors_travel_between_ranks(num_ranks: int) -> None:
    run_on_ranks(num_ranks, tensors_travel)


def objects_travel() -> None:
    world = World.from_environment("cpu")
    for length in (0, 5, 16_000, 16_384, 50_000):
        # Only the last rank's is large: all must still agree on what follows.
        mine = "x" * (length if world.rank == world.size - 1 else world.rank)
        lengths = [*range(world.size - 1), length]
        assert [len(text) for text in world.all_gather_object(mine)] == lengths
        assert len(world.broadcast_object(mine, src=world.size - 1)) == length
    assert world.all_gather_object((world.rank, None)) == [(rank, None) for rank in range(world.size)]
    world.close()


def test_objects_of_any_size_travel_between_ranks() -> None:
    run_on_ranks(3, objects_travel)


def largest_in_one_buffer() -> int:
    overhead = len(pickle.dumps(b"x" * 10_000, pickle.HIGHEST_PROTOCOL)) - 10_000
    return 16 * 1024 - 8 - overhead


def collectives_of_an_object(num_bytes: int) -> tuple[int, int]:
    world = World.from_environment("cpu")
    world.barrier()
    counts = []
    for call in (world.all_gather_object, world.broadcast_object):
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            call(b"x" * num_bytes)
        counts.append(sum(event.count for event in profiled.key_averages() if event.key.startswith("gloo:")))
    world.close()
    return counts[0], counts[1]


def test_a_small_object_takes_one_collective_and_a_large_one_two() -> None:
    assert run_on_ranks(2, collectives_of_an_object, 10) == [(1, 1), (1, 1)]
    assert run_on_ranks(2, collectives_of_an_object, largest_in_one_buffer()) == [(1, 1), (1, 1)]
    assert run_on_ranks(2, collectives_of_an_object, largest_in_one_buffer() + 1) == [(2, 2), (2, 2)]


def groups_of_two_worlds() -> None:
    first, second = World.from_environment("cpu"), World.from_environment("cpu")
    assert first.control is first.control
    assert first.control is not second.control
    first.close()
    first.close()
    assert second.all_gather_object(second.rank) == list(range(second.size))
    # A closed world is built again by its next collective, and the default group outlives both.
    assert first.all_gather_object(0) == [0] * first.size
    first.close()
    second.close()
    assert dist.is_initialized()
    assert second.all_reduce(torch.ones(1)).item() == second.size


def test_worlds_share_the_default_group_and_own_their_control_groups() -> None:
    run_on_ranks(2, groups_of_two_worlds)


def placement_in_a_group(num_nodes: int) -> Placement:
    return placement(num_nodes)


def test_a_group_that_exists_is_believed_before_the_environment() -> None:
    assert run_on_ranks(2, placement_in_a_group, 1) == [Placement(r, 2, r, 2, 0, 1) for r in range(2)]
    assert run_on_ranks(2, placement_in_a_group, 2) == [Placement(r, 2, 0, 1, r, 2) for r in range(2)]


def with_an_error_on_rank_zero() -> str:
    world = World.from_environment("cpu")

    def write() -> None:
        raise OSError(28, "No space left on device", "/checkpoints/mark")

    try:
        on_rank_zero(world, write)
    except StorageError as error:
        return str(error)
    finally:
        world.barrier()
        world.close()
    return ""


def test_all_ranks_hear_that_rank_0_could_not_write() -> None:
    assert (
        run_on_ranks(2, with_an_error_on_rank_zero)
        == ["rank 0 could not read or write: [Errno 28] No space left on device: '/checkpoints/mark'."] * 2
    )
