"""The meter: units, seconds and shares against a count by hand, and where they are shown."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from messages import refuses
from models import ByHand
from ranks import run_on_ranks
from small_fits import Tiny, loader, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx.callbacks import LambdaCallback, ProgressBar, ThroughputMonitor
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.metrics.log_arguments import batch_items
from phalanx.framework.profiling.meter import Meter, SampleCount, SpeedInterval
from phalanx.framework.profiling.throughput import Throughput
from phalanx.loggers import CSVLogger

LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
"""Tokens of each document, which do not divide evenly into batches, windows and ranks."""


class Tokens(Tiny):
    """Learns from padded documents, whose tokens are the weight of a batch."""

    def batch_weight(self, batch: Any) -> Tensor:
        tokens: Tensor = batch[0] != 0
        return tokens.sum()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0][:, :4].float()).square().mean()


class ManualTokens(ByHand, Tokens):
    """The same, by manual optimization."""


def documents(batch_size: int = 2) -> DataLoader[Any]:
    rows = nn.utils.rnn.pad_sequence([torch.ones(length, dtype=torch.long) for length in LENGTHS], batch_first=True)
    return DataLoader(torch.utils.data.TensorDataset(rows), batch_size)


def speed_of(root: Path, module: Tiny, data: DataLoader[Any], **settings: Any) -> Throughput:
    trainer = quiet_trainer(root, [], max_epochs=2, **settings)
    trainer.fit(module, data)
    found = trainer.throughput
    assert found is not None
    return found


class SlowRows(torch.utils.data.Dataset[Any]):
    """Rows that take 5 ms each to be loaded."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return torch.ones(4)


def test_fetches_within_a_window_are_waiting_for_data(tmp_path: Path) -> None:
    found = speed_of(tmp_path, Tiny(), DataLoader(SlowRows(), batch_size=2), accumulate_grad_batches=4)
    # Without them it would be at most a fourth of the time in which rows are loaded.
    assert found.data_share * found.train_seconds >= 2 * 16 * 0.005


def on_ranks(root: str, counts_tokens: bool, window: int) -> tuple[str, float, int, float | None]:
    module, data = (Tokens(), documents()) if counts_tokens else (Tiny(), loader(11, 2))
    found = speed_of(Path(root), module, data, devices=2, strategy="ddp", accumulate_grad_batches=window)
    assert 0 < found.data_share < 1
    assert found.count == pytest.approx(found.per_second * found.train_seconds)
    return found.unit, found.count, found.steps, found.rank_wait_share


@pytest.mark.parametrize(("counts_tokens", "window", "steps"), [(True, 2, 4), (False, 1, 6)])
def test_units_of_uneven_ranks_are_those_counted_by_hand(
    counts_tokens: bool, window: int, steps: int, tmp_path: Path
) -> None:
    first, second = run_on_ranks(2, on_ranks, str(tmp_path), counts_tokens, window)
    assert first == second
    units = ("tokens", 2 * sum(LENGTHS)) if counts_tokens else ("samples", 22)
    assert first[:3] == (*units, steps)
    assert 0 < first[3] < 1


def test_units_of_one_rank(tmp_path: Path) -> None:
    tokens = speed_of(tmp_path, Tokens(), documents(), accumulate_grad_batches=3)
    assert (tokens.unit, tokens.count, tokens.rank_wait_share) == ("tokens", 2 * sum(LENGTHS), None)
    samples = speed_of(tmp_path, Tiny(), loader(11, 2))
    assert (samples.unit, samples.count, samples.steps) == ("samples", 22, 12)


def manual_on_ranks(root: str) -> tuple[str, float, int]:
    found = speed_of(Path(root), ManualTokens(), documents(1), devices=2, strategy="ddp")
    return found.unit, found.count, found.steps


def test_batches_that_manual_optimization_repeats_on_uneven_ranks_are_not_counted(tmp_path: Path) -> None:
    # Of 11 documents the last one has no counterpart on the other rank.
    assert run_on_ranks(2, manual_on_ranks, str(tmp_path)) == [("tokens", 2 * sum(LENGTHS), 12)] * 2


def test_seconds_are_those_of_steps_and_data_without_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def later(seconds: float) -> None:
        now[0] += seconds

    class Slow(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            later(3.0)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            later(1000.0)

    def collate(items: Any) -> Any:
        later(1.0)
        return torch.utils.data.default_collate(items)

    clock = SimpleNamespace(perf_counter=lambda: now[0], monotonic=lambda: now[0])
    monkeypatch.setattr("phalanx.framework.loop.fit_loop.time", clock)
    monkeypatch.setattr("phalanx.framework.profiling.meter.time", clock)
    data = DataLoader(loader(8).dataset, batch_size=2, collate_fn=collate)
    trainer = quiet_trainer(tmp_path, [], max_epochs=2, val_check_interval=2)
    trainer.fit(Slow(), data, loader(4))
    found = trainer.throughput
    assert found is not None
    assert (found.steps, found.train_seconds, found.step_seconds) == (8, 32.0, 4.0)
    assert (found.data_share, found.per_second, found.count) == (0.25, 0.5, 16)


def test_copies_of_the_same_data_count_once() -> None:
    world: Any = SimpleNamespace(size=4, identical=2, device=torch.device("cpu"))
    meter = Meter(world, "tokens")
    meter.flops_per_unit, meter.peak_flops = 10.0, 100.0
    for _ in range(5):
        meter.end_step(0.0, 0.0)
    assert len(meter.unsent()) == 4
    meter.receive((4 * 50.0, 4 * 2.0, 4 * 0.5, 4 * 0.2))
    found = meter.throughput()
    assert found is not None
    assert (found.count, found.per_second, found.steps) == (100.0, 50.0, 5)
    assert (found.flops_per_second, found.mfu) == (500.0, 500.0 / (4 * 100.0))
    assert found.data_share == 0.25
    assert found.rank_wait_share == pytest.approx(0.1)


def test_an_interval_covers_the_steps_since_the_last_reading() -> None:
    world: Any = SimpleNamespace(size=2, identical=1, device=torch.device("cpu"))
    meter = Meter(world)
    interval = SpeedInterval(meter, least_seconds=1.0)
    assert interval.take() is None
    for units in (6.0, 4.0):
        assert interval.take() is None
        meter.end_step(0.0, 0.0)
        meter.unsent()
        meter.receive((units, 1.0, 0.0, 0.0))
    found = interval.take()
    assert found is not None
    assert (found.count, found.steps, found.per_second) == (10.0, 2, 10.0)
    assert interval.take() is None


def test_loggers_receive_the_speed_from_the_callback_alone(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, "", "run")
    trainer = quiet_trainer(tmp_path, ThroughputMonitor(), max_epochs=2, logger=logger, log_every_n_steps=2)
    trainer.fit(Tiny(), loader(20))
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["throughput/per_second"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 5, 7, 9]
    names = {name for name in rows[0] if name.startswith("throughput/")}
    assert names == {
        f"throughput/{name}"
        for name in ("per_second", "step_seconds", "data_share", "flops_per_second", "peak_memory_bytes")
    }
    assert all(float(row["throughput/per_second"]) > 0 for row in rows)

    plain = CSVLogger(tmp_path, "", "plain")
    quiet_trainer(tmp_path, [], max_epochs=1, logger=plain, log_every_n_steps=1).fit(Tiny(), loader())
    assert "throughput" not in (tmp_path / "plain" / "metrics.csv").read_text()
    with refuses(ConfigurationError, "ThroughputMonitor"):
        quiet_trainer(tmp_path, ThroughputMonitor()).fit(Tiny(), loader())


def test_the_report_has_the_speed_of_the_fit(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, [], max_epochs=1, logger=CSVLogger(tmp_path, "", "run"), device_peak_flops=1e9)
    assert trainer.throughput is None
    trainer.fit(Tiny(), loader())
    found = trainer.throughput
    assert found is not None
    told = json.loads((trainer.run_dir / "report.json").read_text())["throughput"]
    # Memory may grow while the report is written.
    assert told.pop("peak_memory_bytes") <= found.as_dict()["peak_memory_bytes"]
    assert told == {name: value for name, value in found.as_dict().items() if name != "peak_memory_bytes"}
    assert set(found.as_dict()) == {field.name for field in fields(Throughput)}
    # A layer of 4 x 1 with inputs that need no gradient: a product in the forward pass, and one in the backward pass.
    assert found.flops_per_unit == 2 * 2 * 4
    assert found.mfu == pytest.approx(16 * found.per_second / 1e9)
    assert found.peak_memory_bytes is not None
    assert found.peak_memory_bytes > 10e6


def test_the_speed_is_shown_beside_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet_trainer(tmp_path, ProgressBar(), max_epochs=1, enable_progress_bar=None).fit(Tiny(), loader())
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 0"))
    metrics, _, speed = line.partition(" samples/s, ")
    assert ", train_loss_epoch " in metrics
    assert speed.startswith("data ")
    assert speed.endswith(" MB") or speed.endswith(" GB")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, "41.2k tok/s, data 2 %"),
        ({"mfu": 0.4321}, "41.2k tok/s, MFU 43 %, data 2 %"),
        ({"mfu": 0.0012, "data_share": 0.0004}, "41.2k tok/s, MFU 0.1 %, data 0.0 %"),
        ({"unit": "samples", "per_second": 9.999}, "10 samples/s, data 2 %"),
        ({"peak_memory_bytes": 51_000_000_000}, "41.2k tok/s, data 2 %, 51.0 GB"),
        ({"per_second": 999.9}, "1k tok/s, data 2 %"),
        ({"per_second": 2.5e6}, "2.5M tok/s, data 2 %"),
    ],
)
def test_the_text_of_a_speed(changes: dict[str, Any], text: str) -> None:
    empty: dict[str, Any] = dict.fromkeys(field.name for field in fields(Throughput))
    assert str(Throughput(**{**empty, "unit": "tokens", "per_second": 41_200.0, "data_share": 0.02, **changes})) == text


@pytest.mark.parametrize("peak", [0, -1.0, True, "1e12"])
def test_a_wrong_peak_is_refused(peak: Any, tmp_path: Path) -> None:
    with refuses(ConfigurationError, "device_peak_flops="):
        quiet_trainer(tmp_path, [], device_peak_flops=peak)


def test_a_failed_fit_has_its_speed(tmp_path: Path) -> None:
    def fail(trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == 2:
            raise RuntimeError("broken")

    logger = CSVLogger(tmp_path, "", "run")
    trainer = quiet_trainer(tmp_path, LambdaCallback(on_train_batch_start=fail), max_epochs=1, logger=logger)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(Tiny(), loader())
    written = json.loads((trainer.run_dir / "report.json").read_text())["throughput"]
    assert (written["steps"], written["count"]) == (2, 8.0)


def test_samples_of_batches_of_any_structure() -> None:
    three, five = torch.ones(3, 2), torch.ones(5, 2)
    named = {"text": ["a", "b"], "x": three}
    batches: list[tuple[Any, int]] = [
        ((three, five), 3),
        ((five, three), 5),
        ((torch.tensor(1.0), five), 1),
        ([five], 5),
        ([named], 3),
        (five, 5),
        ({"x": three}, 3),
        ({"y": five}, 5),
        (named, 3),
        (["a", "b"], 2),
        ((), 1),
        (three, 3),
    ]
    for _ in range(2):
        count = SampleCount()
        for batch, samples in batches:
            assert [SampleCount()(batch), batch_items(batch), count(batch), count(batch)] == [samples] * 4, batch
        batches.reverse()
