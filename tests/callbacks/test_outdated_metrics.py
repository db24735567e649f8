"""Callbacks that judge a metric: a value of earlier weights does not count, and no run ends without a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ranks import run_on_ranks
from small_fits import Tiny, capturing, loader, quiet_trainer

from phalanx.callbacks import EarlyStopping, ModelCheckpoint


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def fitted(root: Path, callbacks: Any, values: list[float], **settings: Any) -> Any:
    """Train epochs of four steps with a validation that logs the values by epoch; return the Trainer."""
    trainer = quiet_trainer(root, callbacks, **{"max_epochs": len(values), **settings})
    trainer.fit(Tiny({"metric": values}), loader(settings.get("devices", 1) * 16), loader(4))
    return trainer


def test_a_save_between_validations_is_ranked_by_the_next_one(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", monitor="metric", every_n_train_steps=3, save_top_k=-1)
    fitted(tmp_path, saver, [0.1, 0.5, 1.0])
    # Due at steps 3, 6, 9 and 12; the run validates at 4, 8 and 12.
    scores = {Path(path).name: round(float(score), 3) for path, score in saver.best_k_models.items()}
    assert scores == {"epoch=0-step=4.ckpt": 0.1, "epoch=1-step=8.ckpt": 0.5, "epoch=2-step=12.ckpt": 1.0}
    assert saver.best_model_path.endswith("epoch=0-step=4.ckpt")


def test_epochs_without_a_validation_are_not_ranked(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", monitor="metric", save_top_k=-1, save_on_train_epoch_end=True)
    fitted(tmp_path, saver, [9, 3, 9, 1, 9], check_val_every_n_epoch=2)
    scores = {Path(path).name: float(score) for path, score in saver.best_k_models.items()}
    assert scores == {"epoch=1-step=8.ckpt": 3, "epoch=3-step=16.ckpt": 1}


def test_epochs_without_a_validation_do_not_count_against_patience(tmp_path: Path) -> None:
    stopper = EarlyStopping("metric", patience=2, check_on_train_epoch_end=True)
    trainer = fitted(tmp_path, stopper, [3, 3, 3, 2, 2, 2, 1, 1, 1], check_val_every_n_epoch=3)
    assert (trainer.current_epoch, stopper.wait_count) == (9, 0)


def test_a_resumed_run_knows_which_values_are_of_earlier_weights(tmp_path: Path) -> None:
    first = ModelCheckpoint(tmp_path / "first", every_n_train_steps=6)
    fitted(tmp_path, first, [3, 2], max_steps=6)
    saver = ModelCheckpoint(tmp_path / "kept", monitor="metric", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(tmp_path, saver, max_epochs=2)
    trainer.fit(Tiny({"metric": [3, 2]}), loader(), loader(4), ckpt_path=first.best_model_path)
    assert [float(score) for score in saver.best_k_models.values()] == [2]


def ended_within_an_epoch(root: Path) -> tuple[list[str], str]:
    saver = ModelCheckpoint(root / "kept", monitor="train_loss")
    fitted(root, saver, [1.0], max_epochs=-1, max_steps=3, devices=2, strategy="ddp")
    return names(root / "kept"), Path(saver.best_model_path).name


def test_a_run_that_ends_within_an_epoch_is_saved_by_a_metric_of_training(tmp_path: Path) -> None:
    for found, best in run_on_ranks(2, ended_within_an_epoch, tmp_path):
        assert (found, best) == (["epoch=0-step=3.ckpt"], "epoch=0-step=3.ckpt")


def test_a_run_that_ends_before_its_first_validation_saves_its_end(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", monitor="metric")
    trainer = quiet_trainer(tmp_path, saver, max_steps=3, max_epochs=-1)
    notes = capturing(trainer)
    trainer.fit(Tiny({"metric": [1.0]}), loader(), loader(4))
    assert names(tmp_path / "kept") == ["last.ckpt"]
    assert any("without a value of 'metric'" in note and "last.ckpt" in note for note in notes)
    # A run that has ranked checkpoints leaves its end out.
    saver = ModelCheckpoint(tmp_path / "ranked", monitor="metric")
    fitted(tmp_path, saver, [1.0], max_epochs=-1, max_steps=6)
    assert names(tmp_path / "ranked") == ["epoch=0-step=4.ckpt"]
