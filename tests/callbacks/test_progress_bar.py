"""The progress bars: what a person sees, and what they cost."""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from small_fits import Tiny, loader, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from phalanx.callbacks import LambdaCallback, ProgressBar, RichProgressBar
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.trainer.trainer import Trainer


class Shown(Tiny):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("metric", 2.0, prog_bar=True)

    test_step = validation_step


def trainer_with(root: Path, *callbacks: Any, **settings: Any) -> Trainer:
    return quiet_trainer(root, list(callbacks), max_epochs=2, **{"enable_progress_bar": None, **settings})


def progress_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if "batches" in line and not line.startswith("│")]


def test_outside_a_terminal_there_is_one_line_for_each_epoch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer_with(tmp_path, ProgressBar()).fit(Shown(), loader(), loader(4))
    output = capsys.readouterr().out
    lines = progress_lines(output)
    assert [line.split(" in ")[0] for line in lines] == ["epoch 0/1: 4 batches", "epoch 1/1: 4 batches"]
    assert "train_loss" in lines[0]
    assert ", metric 2, train_loss_step " in lines[0]
    assert "\x1b" not in output


class Clock:
    """A clock that the test sets, in place of the module ``time``."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_within_long_epochs_lines_come_by_the_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    def tick(*_: Any) -> None:
        clock.now += 4.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("phalanx.callbacks.progress.time", clock)
        bar = ProgressBar()
        trainer_with(tmp_path, LambdaCallback(on_train_batch_start=tick), bar).fit(Tiny(), loader(32))
    lines = [line for line in progress_lines(capsys.readouterr().out) if line.startswith("epoch")][:3]
    assert [line.partition(", train_loss")[0].partition(", metric")[0] for line in lines] == [
        "epoch 0/1: 3/8 batches, 0.25 it/s, 0:20 left",
        "epoch 0/1: 6/8 batches, 0.25 it/s, 8.0 s left",
        "epoch 0/1: 8 batches in 0:32, 0.25 it/s",
    ]


class SlowRows(IterableDataset[Any]):
    """Eight rows, the reading of each of which takes four seconds of a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __iter__(self) -> Iterator[list[Tensor]]:
        for _ in range(8):
            self.clock.now += 4.0
            yield [torch.ones(4)]


def test_the_speed_of_a_resumed_epoch_leaves_out_the_batches_that_it_skips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr("phalanx.callbacks.progress.time", clock)
    data = DataLoader(SlowRows(clock), batch_size=1)
    interrupted = trainer_with(tmp_path, ProgressBar(), max_steps=4)
    interrupted.fit(Tiny(), data)
    interrupted.save_checkpoint(tmp_path / "middle.ckpt")
    capsys.readouterr()
    trainer_with(tmp_path, ProgressBar()).fit(Tiny(), data, ckpt_path=tmp_path / "middle.ckpt")
    ends = [line for line in progress_lines(capsys.readouterr().out) if "8 batches in" in line]
    assert [line.split(", ")[1] for line in ends] == ["0.25 it/s", "0.25 it/s"]


def test_evaluation_is_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trainer_with(tmp_path, ProgressBar())
    trainer.test(Shown(), loader(), verbose=False)
    trainer.validate(Shown(), loader(), verbose=False)
    trainer.predict(_Predicting(), loader())
    lines = progress_lines(capsys.readouterr().out)
    assert [line.split(" in ")[0] for line in lines] == [
        "test: 4 batches",
        "validation: 4 batches",
        "prediction: 4 batches",
    ]


class _Predicting(Tiny):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0])


def test_the_live_bar_draws_in_place_and_keeps_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    before = threading.active_count()
    threads: list[int] = []
    watcher = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: threads.append(threading.active_count()),
        on_train_start=lambda trainer, module: trainer.note("a note with [brackets]"),
    )
    bar = RichProgressBar(refresh_seconds=1e-9)
    # No thread watches over the run either.
    trainer_with(tmp_path, bar, watcher, stall_timeout=False).fit(Shown(), loader(), loader(4))
    output = screen.getvalue()
    assert "\x1b[" in output
    assert "a note with [brackets]" in output
    assert "epoch 1/1" in output
    assert "validation" in output
    assert "metric 2" in output
    assert set(threads) == {before}
    assert sys.stdout is screen


def test_the_screen_is_given_back_when_the_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)

    def fail(trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 2:
            raise RuntimeError("broken")

    bar = RichProgressBar(refresh_seconds=1e-9)
    with pytest.raises(RuntimeError, match="broken"):
        trainer_with(tmp_path, bar, LambdaCallback(on_train_batch_end=fail)).fit(Tiny(), loader())
    assert sys.stdout is screen
    assert screen.getvalue().count("\x1b[?25l") == screen.getvalue().count("\x1b[?25h") == 1


def test_other_ranks_want_no_hooks() -> None:
    class Trainer:
        is_global_zero = False

    bar = ProgressBar()
    bar.setup(Trainer(), None, "fit")  # type: ignore[arg-type]
    assert not bar.wants("on_train_batch_end")
    assert not bar.wants("on_train_epoch_end")


def test_wrong_times_are_refused() -> None:
    with refuses(ConfigurationError, "refresh_seconds=0"):
        ProgressBar(refresh_seconds=0)
    with refuses(ConfigurationError, "RichProgressBar", "line_seconds=-1"):
        RichProgressBar(line_seconds=-1)
