"""The CUDA device of a rank, on a machine that pretends to have some: see also emulated_cuda/test_fits_on_devices."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer

from phalanx.framework.checkpoint.staging import Staging
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.distributed.devices import device_of
from phalanx.framework.distributed.world import World
from phalanx.framework.launch import fork_launcher
from phalanx.framework.memory.available_memory import available_memory
from phalanx.framework.parallel.resources import resolve_resources
from phalanx.framework.system.launcher_env import Placement
from phalanx.framework.trainer import auto_strategy as planning

SECOND = torch.device("cuda", 1)


class Machine:
    """A machine with CUDA devices, and those that were opened."""

    def __init__(self, patch: pytest.MonkeyPatch, visible: int) -> None:
        self.opened: list[torch.device] = []
        patch.setattr(torch.cuda, "device_count", lambda: visible)
        patch.setattr(torch.cuda, "is_available", self._started)
        patch.setattr(torch.cuda, "set_device", self._open)
        for name in ("SLURM_NTASKS", "SLURM_STEP_ID"):
            patch.delenv(name, raising=False)

    def _open(self, device: Any) -> None:
        self.opened.append(torch.device("cuda", torch.device(device).index))

    def _started(self) -> bool:
        raise AssertionError("this query starts CUDA, and no rank could be forked then")


def test_a_listed_device_is_the_only_one_that_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 4)
    world = resolve_resources("cuda", "single", [2], 1, None).connect()
    assert world.device == torch.device("cuda", 2)
    assert machine.opened == [torch.device("cuda", 2)]
    # The list is not kept for other Trainers of this process.
    assert World.from_environment("cuda").device == torch.device("cuda", 0)


def test_a_task_of_slurm_sees_one_device_and_counts_those_of_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 1)
    tasks = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4"}
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "node1", "SLURM_JOB_NAME": "a", **tasks}.items():
        monkeypatch.setenv(name, value)
    resources = resolve_resources("cuda", "ddp", 4, 1, None)
    assert (resources.devices, device_of("cuda", resources.place)) == (4, torch.device("cuda", 0))
    with refuses(ConfigurationError, "devices=8", "SLURM"):
        resolve_resources("cuda", "ddp", 8, 1, None)


def test_more_devices_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 2)
    with refuses(ConfigurationError, "devices=3"):
        resolve_resources("cuda", "ddp", 3, 1, None)
    with refuses(ConfigurationError, "CUDA_VISIBLE_DEVICES"):
        device_of("cuda", Placement(2, 3, 2, 3))


class _Cudart:
    """The calls that pin memory; the first ``failing`` of them fail."""

    def __init__(self, failing: int = 0) -> None:
        self.failing = failing
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.failing -= 1
        if self.failing >= 0:
            return 2
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0


def staging_with(patch: pytest.MonkeyPatch, cudart: _Cudart) -> Staging:
    Machine(patch, 2)
    patch.setattr(torch.cuda, "cudart", lambda: cudart)
    patch.setattr(torch.cuda, "device", lambda device: threading.Lock())
    return Staging(SECOND)


def test_staging_memory_is_pinned_in_its_exact_size_and_unpinned_when_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = _Cudart()
    staging = staging_with(monkeypatch, cudart)
    staging.reserve(5_000_001)
    staging.wait()
    assert list(cudart.pinned.values()) == [5_000_001]
    assert list(cudart.pinned) == [staging._memory.data_ptr()]
    pid = os.fork()
    if pid == 0:
        # Worker processes copy the object, and own none of the pinned memory.
        del staging
        os._exit(len(cudart.pinned))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    staging._memory = torch.empty(0)
    assert cudart.pinned == {}


def test_memory_that_cannot_be_pinned_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = _Cudart(failing=1)
    staging = staging_with(monkeypatch, cudart)
    staging.reserve(4096)
    staging.wait()
    assert (cudart.pinned, len(staging._memory)) == ({}, 4096)


def _answer(asked: list[Any], answer: Any, device: torch.device) -> Any:
    asked.append(device)
    return answer


def test_available_memory_is_that_of_the_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    giga = 10**9
    for name, answer in {
        "get_memory_info": (10 * giga, 20 * giga),
        "memory_reserved": 3 * giga,
        "memory_allocated": giga,
    }.items():
        monkeypatch.setattr(torch.accelerator, name, partial(_answer, asked, answer))
    # Without what CUDA's libraries take, and NCCL's buffers between ranks.
    assert available_memory(SECOND, 1, None).device == 11.5 * giga
    assert available_memory(SECOND, 2, None).device == 10.5 * giga
    assert asked == [SECOND] * 6


class _NotingProcess(Regressor):
    folder: Path

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (self.folder / str(os.getpid())).touch()
        return super().training_step(batch, batch_idx)


def test_a_plan_for_ranks_to_come_is_made_in_a_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = _NotingProcess()
    module.folder = tmp_path
    trainer = silent_trainer(devices=2)
    here = trainer.plan(module, loader())
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
    (tmp_path / str(os.getpid())).unlink()
    monkeypatch.setattr(planning, "_needs_child", lambda resources: True)
    # A build of torch with CUDA may be without a driver here.
    monkeypatch.setattr(fork_launcher, "forked_ranks_can_use_cuda", lambda: True)
    plan = trainer.plan(module, loader())
    assert [path.name != str(os.getpid()) for path in tmp_path.iterdir()] == [True]
    assert [row.needs for row in plan.rows] == [row.needs for row in here.rows]


@pytest.mark.parametrize(
    ("launches", "device_type", "forks", "expected"),
    [
        (True, "cuda", True, True),
        (False, "cuda", True, False),
        (True, "cpu", True, False),
        (True, "cuda", False, False),
    ],
)
def test_only_ranks_to_come_need_a_child(
    monkeypatch: pytest.MonkeyPatch, launches: bool, device_type: str, forks: bool, expected: bool
) -> None:
    monkeypatch.setattr(planning, "forked_ranks_can_use_cuda", lambda: forks)
    resources: Any = SimpleNamespace(must_launch=launches, device_type=device_type)
    assert planning._needs_child(resources) is expected
