"""``DeviceStatsMonitor`` in real fits."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks
from small_fits import Tiny, capturing, loader, quiet_trainer

from phalanx.callbacks import DeviceStatsMonitor
from phalanx.framework.core.errors import ConfigurationError
from phalanx.loggers import CSVLogger

CPU_STATS = {"cpu_percent", "cpu_vm_percent", "cpu_swap_percent"}


def logged(root: Path, monitor: Any, **settings: Any) -> dict[int, set[str]]:
    """Return the names of the statistics that a fit of 8 steps logs, by step."""
    settings = {"max_epochs": 2, "logger": CSVLogger(root, "", "run"), "log_every_n_steps": 3, **settings}
    trainer = quiet_trainer(root, monitor, **settings)
    trainer.fit(Tiny(), loader(samples=16 * trainer.world_size))
    if not trainer.is_global_zero:
        return {}
    with open(next(root.rglob("metrics.csv"))) as file:
        rows = list(csv.DictReader(file))
    found: dict[int, set[str]] = {}
    for row in rows:
        names = {name for name, value in row.items() if value and name.startswith("DeviceStatsMonitor.")}
        if names:
            found.setdefault(int(row["step"]), set()).update(names)
    return found


def expected(stats: set[str]) -> set[str]:
    hooks = ("on_train_batch_start", "on_train_batch_end")
    return {f"DeviceStatsMonitor.{hook}/{name}" for hook in hooks for name in stats}


def test_one_row_for_a_step_of_several_batches(tmp_path: Path) -> None:
    found = logged(tmp_path, DeviceStatsMonitor(), accumulate_grad_batches=2, log_every_n_steps=1)
    assert len(found) == 4
    assert all(names == expected(CPU_STATS) for names in found.values())


def on_ranks(root: str) -> dict[int, set[str]]:
    return logged(Path(root), DeviceStatsMonitor(), devices=2, strategy="ddp")


def test_rank_zero_logs_at_the_steps_that_are_logged(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, on_ranks, str(tmp_path))
    assert [len(first), second] == [2, {}]
    assert all(names == expected(CPU_STATS) for names in first.values())


def test_nothing_about_the_cpu_if_it_is_not_wanted(tmp_path: Path) -> None:
    assert logged(tmp_path, DeviceStatsMonitor(cpu_stats=False)) == {}


@pytest.mark.parametrize(("cpu_stats", "stats"), [(None, {"a.current"}), (True, {"a.current", *CPU_STATS})])
def test_memory_of_a_gpu_is_read_at_the_steps_that_are_logged(
    cpu_stats: bool | None, stats: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, rows = list[int](), list[dict[str, float]]()

    def memory_stats(device: Any) -> dict[str, int]:
        reads.append(1)
        return {"a.current": 5}

    monkeypatch.setattr(torch.accelerator, "memory_stats", memory_stats)
    monitor = DeviceStatsMonitor(cpu_stats)
    trainer = SimpleNamespace(
        world=SimpleNamespace(device=torch.device("cuda")),
        is_global_zero=True,
        log_every_n_steps=4,
        global_step=0,
        log_metrics=rows.append,
    )
    view: Any = trainer
    monitor.on_train_start(view, Tiny())
    for index in range(8):
        monitor.on_train_batch_start(view, Tiny(), None, index)
        trainer.global_step += 1
        monitor.on_train_batch_end(view, Tiny(), None, None, index)
    assert [set(row) for row in rows] == [expected(stats)] * 2
    assert len(reads) == 4


def test_without_psutil_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr("phalanx.callbacks.device_stats.find_spec", lambda name: None)
    trainer = quiet_trainer(tmp_path, DeviceStatsMonitor(), max_epochs=1, logger=CSVLogger(tmp_path, "", "run"))
    notes = capturing(trainer)
    trainer.fit(Tiny(), loader())
    assert "DeviceStatsMonitor logs nothing about the CPU, as psutil is not installed." in notes
    with refuses(ConfigurationError, "cpu_stats=True", "psutil"):
        quiet_trainer(tmp_path, DeviceStatsMonitor(True), logger=CSVLogger(tmp_path, "", "run")).fit(Tiny(), loader())


def test_misuse_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigurationError, "DeviceStatsMonitor"):
        quiet_trainer(tmp_path, DeviceStatsMonitor()).fit(Tiny(), loader())
    with refuses(ConfigurationError, "cpu_stats='yes'"):
        DeviceStatsMonitor("yes")  # type: ignore[arg-type]
