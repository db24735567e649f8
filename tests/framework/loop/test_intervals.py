"""Limits and intervals in steps, epochs, tokens, samples and time, on one rank and on two, and after a resume."""

from __future__ import annotations

import csv
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from messages import refuses
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import Tensor

from phalanx import Callback, Trainer
from phalanx.callbacks import GradientNormMonitor, ModelCheckpoint, ThroughputMonitor, Timer
from phalanx.errors import CheckpointError, ConfigurationError
from phalanx.framework.core.intervals import Due, Interval, parse_duration
from phalanx.loggers import CSVLogger

# ---- the language ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "number", "unit"),
    [
        ("1000 steps", 1000, "steps"),
        ("1 step", 1, "steps"),
        (7, 7, "steps"),
        ("2 epochs", 2, "epochs"),
        ("1e9 tokens", 1_000_000_000, "tokens"),
        ("1.5e3 samples", 1500, "samples"),
        ("5_000_000samples", 5_000_000, "samples"),
        ("30 min", 1800, "seconds"),
        ("0.5 h", 1800, "seconds"),
        ("2 d", 172_800, "seconds"),
        ("01:00:00:30", 86_430, "seconds"),
        (timedelta(minutes=2), 120, "seconds"),
        ({"hours": 1}, 3600, "seconds"),
    ],
)
def test_texts_and_numbers_are_intervals(given: Any, number: float, unit: str) -> None:
    interval = Interval.parse(given)
    assert (interval.number, interval.unit) == (number, unit)
    assert Interval.parse(str(interval)) == interval


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("100 stpes", ["'100 stpes'", "'stpes' is not a unit", "Did you mean 'steps'"]),
        ("3 tokns", ["Did you mean 'tokens'"]),
        ("100", ["every='100'", "'1000 steps'"]),
        ("0.5 steps", ["every='0.5 steps'", "whole number of steps"]),
        ("0 epochs", ["at least 1"]),
        ("-3 steps", ["every='-3 steps'"]),
        ("0 min", ["longer than zero"]),
        (0, ["every=0"]),
        (True, ["every=True"]),
        (None, ["every=None"]),
        ({"fortnights": 1}, ["fortnights", "timedelta"]),
    ],
)
def test_what_is_no_interval_is_refused(given: Any, words: list[str]) -> None:
    with refuses(ConfigurationError, *words):
        Interval.parse(given)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_steps": "2 epochs"}, ["max_steps='2 epochs' is in epochs", "in steps"]),
        ({"duration": "1e6 tokns"}, ["duration='1e6 tokns'", "'tokens'"]),
        ({"duration": "2 epochs", "max_epochs": 3}, ["duration='2 epochs'", "max_epochs=3"]),
        ({"duration": "1 h", "max_time": "2 h"}, ["duration='1 h'", "max_time"]),
        ({"max_time": "30 mim"}, ["max_time='30 mim'", "'min'"]),
        ({"max_time": "3 steps"}, ["max_time='3 steps'", "'30 min'"]),
        ({"snapshots": "2 epochs"}, ["snapshots='2 epochs' is in epochs"]),
        ({"log_every_n_steps": "1 epoch"}, ["log_every_n_steps='1 epoch' is in epochs"]),
        ({"verify_every": "10 stps"}, ["verify_every='10 stps'", "'steps'"]),
        ({"val_check_interval": "2 epochs", "check_val_every_n_epoch": 3}, ["check_val_every_n_epoch=3"]),
        ({"val_check_interval": "100 stpes"}, ["val_check_interval='100 stpes'", "'steps'"]),
        ({"stall_timeout": "10 mins"}, ["stall_timeout='10 mins'", "'min'"]),
    ],
)
def test_a_trainer_refuses_intervals_before_anything_starts(arguments: dict[str, Any], words: list[str]) -> None:
    with refuses(ConfigurationError, *words):
        Trainer(**arguments)


def test_texts_mean_what_the_numbers_mean() -> None:
    trainer = silent_trainer(
        max_steps="1000 steps", max_epochs="3 epochs", max_time="1.5 h", log_every_n_steps="10 steps",
        val_check_interval="0.5 epochs",
    )  # fmt: skip
    assert (trainer.max_steps, trainer.max_epochs, trainer.log_every_n_steps) == (1000, 3, 10)
    assert trainer.settings.max_time == timedelta(hours=1.5)
    assert trainer.val_check_interval == 0.5
    assert silent_trainer(val_check_interval="3 epochs").check_val_every_n_epoch == 3
    assert silent_trainer(val_check_interval="2 min").val_check_interval == timedelta(minutes=2)
    assert silent_trainer(duration="7 steps").max_steps == 7
    assert silent_trainer(duration="7 steps").max_epochs is None
    assert silent_trainer(duration="2 epochs").max_epochs == 2
    assert parse_duration("2 min", "x") == timedelta(minutes=2)
    assert Timer("90 s").time_remaining() == 90.0


# ---- tokens and samples ----------------------------------------------------------------------------------------------


class Weighted(Regressor):
    """Counts 3 tokens for each of its samples, and notes the steps after which it validates."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.validated_at: list[int] = []

    def batch_weight(self, batch: Any) -> int | float | Tensor:
        return 3 * len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated_at.append(self.trainer.global_step)


class Sampled(Weighted):
    """Counts its samples."""

    batch_weight = Regressor.batch_weight


class Marks(Callback):
    """Notes the steps after which an interval has passed."""

    monitors = True

    def __init__(self, interval: str) -> None:
        self.counted_intervals = (Interval.parse(interval),)
        self.steps: list[int] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.due = Due(self.counted_intervals[0], trainer, "marks")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.due.reached():
            self.steps.append(trainer.global_step)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.due.reached():
            self.steps.append(trainer.global_step)


def due_steps(counts: list[int], every: int) -> list[int]:
    """Return the steps, from 1, at which the sum of their counts first reaches a multiple of ``every``."""
    due, total = [], 0
    for step, count in enumerate(counts, 1):
        if (total + count) // every > total // every:
            due.append(step)
        total += count
    return due


def counts_of(ranks: int, window: int, per_sample: int, steps: int) -> list[int]:
    """Return what each step trains: an epoch has 9 batches of 4 samples, and one of 2."""
    batches = [4] * 9 + [2]
    size = ranks * window
    epoch = [sum(batches[start : start + size]) * per_sample for start in range(0, len(batches), size)]
    return (epoch * (1 + steps // len(epoch)))[:steps]


def fitted(kind: str, ranks: int, arguments: dict[str, Any], marks: str) -> tuple[int, list[int], list[int], Any]:
    module = {"tokens": Weighted, "manual": lambda: Weighted(manual=True), "samples": Sampled}[kind]()
    callback = Marks(marks)
    trainer = silent_trainer(devices=ranks, callbacks=callback, num_sanity_val_steps=0, **arguments)
    trainer.fit(module, loader(38), loader(8))
    return trainer.global_step, callback.steps, module.validated_at, trainer.progress.units


@pytest.mark.parametrize(
    ("kind", "window", "ranks"),
    [("tokens", 2, 1), ("samples", 1, 1), ("tokens", 1, 2), ("samples", 2, 2), ("manual", 1, 2)],
)
def test_counted_intervals_are_those_of_all_ranks(kind: str, window: int, ranks: int) -> None:
    unit, per_sample = ("samples", 1) if kind == "samples" else ("tokens", 3)
    arguments = {
        "accumulate_grad_batches": window, "duration": f"{100 * per_sample} {unit}",
        "val_check_interval": f"{11 * per_sample} {unit}",
    }  # fmt: skip
    results = run_on_ranks(ranks, fitted, kind, ranks, arguments, f"{30 * per_sample} {unit}")
    counts = counts_of(ranks, window, per_sample, 40)
    last = next(step for step in range(40) if sum(counts[:step]) >= 100 * per_sample)
    counts = counts[:last]
    for steps, marks, validated, units in results:
        assert steps == last
        assert units == sum(counts)
        assert marks == due_steps(counts, 30 * per_sample)
        assert validated == due_steps(counts, 11 * per_sample)


def test_steps_and_epochs_are_due_as_they_end() -> None:
    arguments = {"max_epochs": 4, "val_check_interval": "7 steps"}
    steps, marks, validated, _ = fitted("tokens", 1, arguments, "2 epochs")
    assert (steps, marks, validated) == (40, [20, 40], [7, 14, 21, 28, 35])


def saved(ranks: int, path: Path, steps: int, ckpt_path: str | None = None) -> tuple[list[str], float]:
    saves = ModelCheckpoint(path, "{step}", every="10 samples", save_top_k=-1)
    trainer = silent_trainer(
        devices=ranks, global_batch_size=4, max_steps=steps, callbacks=saves, enable_checkpointing=True,
        default_root_dir=path,
    )  # fmt: skip
    trainer.fit(Sampled(), loader(38), ckpt_path=ckpt_path)
    return sorted(each.name for each in path.glob("step=*.ckpt")), float(trainer.progress.units or 0)


def test_saves_by_samples_go_on_after_a_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole = saved(1, tmp_path / "whole", 25)
    due = due_steps(([4] * 9 + [2]) * 3, 10)
    assert whole[0] == sorted(f"step={step}.ckpt" for step in due if step <= 25)
    parts = tmp_path / "parts"
    run_on_ranks(2, saved, 2, parts, 13)
    newest = parts / "step=13.ckpt"
    assert newest.exists()
    assert saved(1, parts, 25, str(newest)) == whole


def test_a_resumed_fit_validates_where_the_whole_fit_does(tmp_path: Path) -> None:
    def fit(steps: int, ckpt_path: str | None = None) -> list[int]:
        module = Weighted()
        saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
        trainer = silent_trainer(
            max_steps=steps, callbacks=saves, enable_checkpointing=True, val_check_interval="30 tokens",
            num_sanity_val_steps=0, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, loader(38), loader(8), ckpt_path=ckpt_path)
        return module.validated_at

    whole = fit(24)
    assert whole == due_steps(([12] * 9 + [6]) * 3, 30)[: len(whole)]
    # At step 5 the checkpoint is saved before the validation that is due there.
    assert 5 in whole
    assert fit(24, str(tmp_path / "step=5.ckpt")) == [step for step in whole if step >= 5]


def test_tokens_need_a_module_that_counts_them(tmp_path: Path) -> None:
    with refuses(ConfigurationError, "duration='10 tokens'", "counts samples", "batch_weight"):
        silent_trainer(duration="10 tokens").fit(Sampled(), loader(8))
    saves = ModelCheckpoint(tmp_path, every="10 samples")
    with refuses(ConfigurationError, "'10 samples' of ModelCheckpoint", "counts tokens"):
        silent_trainer(max_steps=2, callbacks=saves, enable_checkpointing=True).fit(Weighted(), loader(8))


def uncounted(path: Path) -> str:
    trainer = silent_trainer(devices=2, max_steps=2)
    trainer.fit(Sampled(), loader(38))
    assert trainer.progress.units is None
    trainer.save_checkpoint(path)
    return str(path)


def test_a_count_that_a_checkpoint_lacks_is_not_made_up(tmp_path: Path) -> None:
    path, _ = run_on_ranks(2, uncounted, tmp_path / "two.ckpt")
    with refuses(CheckpointError, "counts samples", "no count"):
        silent_trainer(duration="100 samples").fit(Sampled(), loader(38), ckpt_path=path)


# ---- time ------------------------------------------------------------------------------------------------------------


def timed(ranks: int) -> tuple[int, list[int]]:
    marks = Marks("0.02 s")
    trainer = silent_trainer(devices=ranks, duration="0.3 s", callbacks=marks)
    trainer.fit(Regressor(), loader(38))
    return trainer.global_step, marks.steps


def test_time_passes_for_all_ranks_at_the_same_step() -> None:
    first, second = run_on_ranks(2, timed, 2)
    assert first == second
    steps, marks = first
    assert 1 <= len(marks) <= 15
    assert steps > marks[0]


def test_monitors_log_at_their_own_intervals(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    monitors = [ThroughputMonitor(every="30 tokens"), GradientNormMonitor(every="4 steps")]
    trainer = silent_trainer(max_steps=12, logger=logger, callbacks=monitors, default_root_dir=tmp_path)
    trainer.fit(Weighted(), loader(38))
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    speeds, norms = (
        [int(row["step"]) + 1 for row in rows if row[name]] for name in ("throughput/per_second", "grad_norm")
    )
    assert speeds == due_steps(([12] * 9 + [6]) * 2, 30)[:4]
    assert norms == [4, 8, 12]
