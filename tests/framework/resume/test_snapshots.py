"""Restarted ranks continue from snapshots in memory, which are verified and disappear with the launch."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import Attempts
from recovery_trials import Tally, run_trials
from small_fits import Tiny, loader, quiet_trainer

from phalanx.callbacks import ModelCheckpoint
from phalanx.errors import ConfigurationError
from phalanx.framework.core.errors import Preempted
from phalanx.framework.trainer import loop_assembly

NEWEST, OLDER = "memory-1.ckpt", "memory-0.ckpt"


class Failed(Exception):
    """The failure of a rank."""


class Launch(Attempts):
    """A launch of one rank in this process, with memory that its attempts share."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        super().__init__(folder / "launch", patch)
        self.root, self.memory = folder, self.folder / "memory"
        self.memory.mkdir(parents=True)

    def fit(self, module: Model, *callbacks: Any, every: Any = 1, **settings: Any) -> Any:
        """Fit for 6 steps; return the Trainer."""
        settings = {"max_steps": 6, **settings}
        trainer = quiet_trainer(self.root, [*callbacks], snapshots=every, **settings)
        trainer.fit(module, loader())
        return trainer

    def fail(self, step: int, **settings: Any) -> None:
        """Begin an attempt that fails in the training step after ``step`` optimizer steps."""
        self.begin()
        with pytest.raises(Failed):
            self.fit(Model(fails_at=step), **settings)


class Model(Tiny):
    """Records the steps that it trains; fails at one of them."""

    def __init__(self, fails_at: int = -1, bad_at: int = -1) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.fails_at, self.bad_at = fails_at, bad_at
        self.trained: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == self.fails_at:
            raise Failed
        self.trained.append(self.global_step)
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_step == self.bad_at else loss


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    return Launch(tmp_path, monkeypatch)


@pytest.fixture
def undisturbed(tmp_path: Path) -> dict[str, Any]:
    module = Model()
    quiet_trainer(tmp_path / "whole", [], max_steps=6).fit(module, loader())
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_equal(module: Model, expected: dict[str, Any]) -> None:
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_fit_continues_from_the_newest_snapshot(launch: Launch, undisturbed: dict[str, Any]) -> None:
    launch.fail(4)
    launch.begin()
    module = Model()
    launch.fit(module)
    assert module.trained == [4, 5]
    assert_equal(module, undisturbed)
    assert [*launch.memory.iterdir()] == []


def test_a_damaged_snapshot_is_named_and_the_other_one_is_used(
    launch: Launch, undisturbed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    launch.fail(4)
    file = next((launch.memory / "fit_0" / NEWEST).glob("model-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    launch.begin()
    module = Model()
    launch.fit(module)
    assert module.trained == [3, 4, 5]
    assert_equal(module, undisturbed)
    assert f"Skipped {NEWEST}: " in capsys.readouterr().out
    # The one that the fit continued from was replaced last, so that one is good at any time.
    launch.fail(1)


def test_what_a_rank_left_that_was_killed_while_it_wrote_one_takes_no_memory(launch: Launch) -> None:
    launch.fail(4)
    left = launch.memory / "fit_0" / f".{OLDER}.0123456789abcdef.tmp"
    left.mkdir()
    (left / "model-00000.safetensors").write_bytes(b"half")
    launch.fail(4)
    assert not left.exists()


def test_a_run_that_goes_back_takes_further_snapshots(launch: Launch) -> None:
    class Bad(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.trained[-1:] == [5] and self.global_step == 5:
                raise Failed
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.trained == [0, 1, 2, 3] else loss

    launch.begin()
    saver = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    module = Bad(fails_at=6)
    with pytest.raises(Failed):
        launch.fit(module, saver, max_steps=8, nonfinite="rewind")
    assert module.trained == [0, 1, 2, 3, 2, 3, 4, 5]
    assert sorted(path.name for path in (launch.memory / "fit_0").glob("*.ckpt")) == [OLDER, NEWEST]
    launch.begin()
    resumed = Model()
    launch.fit(resumed, ModelCheckpoint(), max_steps=8)
    assert resumed.trained == [6, 7]


def test_a_newer_checkpoint_on_the_disk_is_used(launch: Launch, undisturbed: dict[str, Any]) -> None:
    saver = ModelCheckpoint(every_n_train_steps=1)
    launch.begin()
    with pytest.raises(Failed):
        launch.fit(Model(fails_at=5), saver, every=3)
    launch.begin()
    module = Model()
    launch.fit(module, ModelCheckpoint(every_n_train_steps=1))
    assert module.trained == [5]
    assert_equal(module, undisturbed)


def test_a_preempted_fit_saves_although_it_has_done_nothing_since_a_snapshot(launch: Launch) -> None:
    class Told(Model):
        def on_train_start(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    launch.begin()
    with pytest.raises(Failed):
        launch.fit(Model(fails_at=3), ModelCheckpoint())
    launch.begin()
    with pytest.raises(Preempted):
        launch.fit(Told(), ModelCheckpoint())
    (saved,) = launch.root.rglob("preempted.ckpt")
    assert saved.is_dir()


def test_weights_that_are_not_finite_end_the_snapshots_and_not_the_fit(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    launch.begin()
    module = Model(bad_at=2)
    launch.fit(module, nonfinite="ignore")
    assert module.trained == [0, 1, 2, 3, 4, 5]
    assert capsys.readouterr().out.count("No more snapshots are taken") == 1


def test_without_room_no_snapshots_are_taken(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loop_assembly, "disk_free", lambda path: 10)
    launch.fail(4)
    assert "and 10 are free in" in capsys.readouterr().out
    launch.begin()
    module = Model()
    launch.fit(module, every="auto")
    assert len(module.trained) == 6


def test_a_second_fit_frees_the_memory_of_a_first_whose_error_was_caught(launch: Launch) -> None:
    launch.fail(2)
    with pytest.raises(Failed):
        launch.fit(Model(fails_at=3))
    assert [path.name for path in launch.memory.iterdir()] == ["fit_1"]


def test_snapshots_that_nothing_would_use_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet_trainer(tmp_path, [], max_steps=1, snapshots=2).fit(Model(), loader())
    assert "snapshots=2 has no effect on this run" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"snapshots=0: give a number of optimizer steps"):
        quiet_trainer(tmp_path, [], snapshots=0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_killed_ranks_are_restarted_from_memory(tmp_path: Path, strategy: str) -> None:
    tally: Tally = run_trials(tmp_path, strategy, 2, "1", trials=2, kills=2, seed=1)
    assert tally.problems == []
    assert tally.identical == tally.trials == tally.deleted == 2
    assert max(tally.again) <= 1
