"""``ModelCheckpoint``, in real fits: what lies on the disk afterwards."""

from __future__ import annotations

import os
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks
from small_fits import Tiny, capturing, loader, quiet_trainer

from phalanx import checkpoint
from phalanx.callbacks import Callback, ModelCheckpoint
from phalanx.framework.core.errors import ConfigurationError, MetricError
from phalanx.framework.metrics.logger import Logger

NAN = float("nan")


def fit(root: Path, callback: Callback, values: list[float] | None = None, **settings: Any) -> list[str]:
    """Train one epoch for each value of ``metric``; return what was told."""
    defaults = {"max_epochs": len(values) if values else 3}
    trainer = quiet_trainer(root, callback, **{**defaults, **settings})
    notes = capturing(trainer)
    if values is None:
        trainer.fit(Tiny(), loader())
    else:
        trainer.fit(Tiny({"metric": values}), loader(), loader(4))
    return notes


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def progress(path: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = checkpoint.open_checkpoint(path).document["progress"]
    return found


# ---- which are kept --------------------------------------------------------------------------------------------------


def test_without_a_metric_the_newest_is_kept(tmp_path: Path) -> None:
    saver = ModelCheckpoint()
    fit(tmp_path, saver)
    directory = tmp_path / "phalanx_logs" / "version_0" / "checkpoints"
    assert names(directory) == ["epoch=2-step=12.ckpt"]
    assert saver.best_model_path == str(directory / "epoch=2-step=12.ckpt")
    assert saver.best_model_score is None
    assert not checkpoint.verify(saver.best_model_path)


def test_without_a_metric_all_can_be_kept_or_none(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "all", save_top_k=-1))
    assert names(tmp_path / "all") == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt"]
    fit(tmp_path, ModelCheckpoint(tmp_path / "none", save_top_k=0))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("settings", "values", "kept", "best"),
    [
        ({}, [3, 1, 2], [1], 1),
        ({"mode": "max"}, [3, 5, 2], [5], 5),
        ({"save_top_k": 2}, [3, 1, 2], [1, 2], 1),
        ({"save_top_k": 2}, [1, 2, 3], [1, 2], 1),
        ({"save_top_k": -1}, [3, 1, 2], [1, 2, 3], 1),
        ({"save_top_k": 2}, [NAN, 1, NAN], [1], 1),
        ({"save_top_k": 1}, [1, 1, 1], [1], 1),
    ],
)
def test_the_best_k_are_kept(
    tmp_path: Path, settings: dict[str, Any], values: list[float], kept: list[float], best: float
) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", "{epoch}-{metric:.0f}", "metric", **settings)
    fit(tmp_path, saver, values)
    assert sorted(int(name.partition("metric=")[2].removesuffix(".ckpt")) for name in names(tmp_path / "kept")) == kept
    assert saver.best_model_score is not None
    assert saver.best_model_score.item() == best
    assert f"metric={best}" in saver.best_model_path
    assert sorted(float(score) for score in saver.best_k_models.values()) == kept
    assert {str(tmp_path / "kept" / name) for name in names(tmp_path / "kept")} == set(saver.best_k_models)


def test_the_kth_best_is_what_has_to_be_beaten(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", monitor="metric", save_top_k=2)
    assert saver.kth_value.item() == float("inf")
    fit(tmp_path, saver, [3, 1, 2])
    assert saver.kth_value.item() == 2
    assert saver.kth_best_model_path.endswith("epoch=2-step=12.ckpt")
    assert saver.current_score is not None
    assert saver.current_score.item() == 2


def test_last_is_the_newest_state_and_knows_the_paths_that_hold_after_it_was_saved(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", monitor="metric", save_last=True)
    fit(tmp_path, saver, [3, 1, 2])
    assert names(tmp_path / "kept") == ["epoch=1-step=8.ckpt", "last.ckpt"]
    assert progress(saver.last_model_path)["global_step"] == 12
    assert progress(saver.best_model_path)["global_step"] == 8
    assert not checkpoint.verify(saver.last_model_path)
    state = checkpoint.load(saver.last_model_path)["state"]["callbacks"][saver.state_key]
    assert state["best_k_models"] == {saver.best_model_path: 1.0}
    assert state["last_model_path"] == saver.last_model_path


def test_last_and_best_share_their_bytes_and_outlive_one_another(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", save_last="link")
    fit(tmp_path, saver, max_epochs=1)
    inodes = [{f.stat().st_ino for f in Path(p).iterdir()} for p in (saver.best_model_path, saver.last_model_path)]
    assert inodes[0] == inodes[1]
    checkpoint.remove(saver.best_model_path)
    assert not checkpoint.verify(saver.last_model_path)


def test_last_is_saved_at_the_end_too(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", save_last=True, every_n_train_steps=3)
    fit(tmp_path, saver, max_steps=5, max_epochs=-1)
    assert names(tmp_path / "kept") == ["epoch=0-step=3.ckpt", "last.ckpt"]
    assert progress(saver.last_model_path)["global_step"] == 5


def test_weights_alone_can_be_saved(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", save_weights_only=True)
    fit(tmp_path, saver, max_epochs=1)
    assert set(checkpoint.open_checkpoint(saver.best_model_path).sections) == {"model"}


def test_a_checkpoint_with_weights_that_are_not_finite_is_not_saved(tmp_path: Path) -> None:
    class Spoiled(Tiny):
        def on_train_epoch_end(self) -> None:
            if self.current_epoch == 1:
                with torch.no_grad():
                    self.layer.weight.fill_(NAN)

    saver = ModelCheckpoint(tmp_path / "kept", monitor="metric", save_last=True)
    trainer = quiet_trainer(tmp_path, saver, max_epochs=2, nonfinite="ignore")
    notes = capturing(trainer)
    trainer.fit(Spoiled({"metric": [2, 1]}), loader(), loader(4))
    assert names(tmp_path / "kept") == ["epoch=0-step=4.ckpt", "last.ckpt"]
    assert saver.best_model_score is not None
    assert saver.best_model_score.item() == 2
    assert progress(saver.last_model_path)["global_step"] == 4
    assert any("No checkpoint was saved at step 8" in note for note in notes)


# ---- when ------------------------------------------------------------------------------------------------------------


def test_by_steps_counts_optimizer_steps_once_each(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_train_steps=2)
    fit(tmp_path, saver, max_epochs=2, accumulate_grad_batches=2)
    assert names(tmp_path / "kept") == ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"]


def test_by_epochs(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_epochs=2), max_epochs=5)
    assert names(tmp_path / "kept") == ["epoch=1-step=8.ckpt", "epoch=3-step=16.ckpt"]


def test_by_time_saves_at_the_step_after(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "kept", save_top_k=-1, train_time_interval=timedelta(0)), max_epochs=1)
    assert names(tmp_path / "kept") == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
    fit(tmp_path, ModelCheckpoint(tmp_path / "never", train_time_interval=timedelta(days=1)))
    # Not due, but a run does not end without any checkpoint.
    assert names(tmp_path / "never") == ["last.ckpt"]


def test_after_each_of_several_validations(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "kept", monitor="metric", save_top_k=-1)
    fit(tmp_path, saver, [1], val_check_interval=2)
    assert names(tmp_path / "kept") == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]


def test_a_trial_run_saves_nothing(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "kept", save_last=True), fast_dev_run=True, enable_checkpointing=None)
    assert not (tmp_path / "kept").exists()


def test_hooks_of_every_batch_are_not_wanted_for_epochs() -> None:
    assert not ModelCheckpoint().wants("on_train_batch_end")
    assert ModelCheckpoint(every_n_train_steps=5).wants("on_train_batch_end")
    assert ModelCheckpoint(train_time_interval=timedelta(1)).wants("on_train_batch_end")


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filename", "settings", "name"),
    [
        (None, {}, "epoch=3-step=1200.ckpt"),
        ("{epoch:02d}-{val_loss:.2f}", {}, "epoch=03-val_loss=0.12.ckpt"),
        ("run-{val/loss:.1f}", {}, "run-val_loss=0.1.ckpt"),
        ("e{epoch}-{val/loss:.1f}", {"auto_insert_metric_name": False}, "e3-0.1.ckpt"),
        ("plain", {}, "plain.ckpt"),
        ("{epoch_test:.0f}-{epoch}", {}, "epoch_test=7-epoch=3.ckpt"),
    ],
)
def test_names(filename: str | None, settings: dict[str, Any], name: str) -> None:
    saver = ModelCheckpoint(filename=filename, **settings)
    metrics = {"epoch": 3, "step": 1200, "val_loss": torch.tensor(0.123), "val/loss": 0.123, "epoch_test": 7.0}
    assert saver.format_checkpoint_name(metrics) == name
    assert saver.format_checkpoint_name(metrics, ver=2) == name.replace(".ckpt", "-v2.ckpt")


def test_a_taken_name_gets_a_version_or_is_replaced(tmp_path: Path) -> None:
    fit(tmp_path, ModelCheckpoint(tmp_path / "kept", "model", save_top_k=-1), max_epochs=3)
    assert names(tmp_path / "kept") == ["model-v1.ckpt", "model-v2.ckpt", "model.ckpt"]
    saver = ModelCheckpoint(tmp_path / "one", "model", save_top_k=-1, enable_version_counter=False)
    fit(tmp_path, saver, max_epochs=3)
    assert names(tmp_path / "one") == ["model.ckpt"]
    assert progress(saver.best_model_path)["global_step"] == 12
    fit(tmp_path, ModelCheckpoint(tmp_path / "newest", "model"), max_epochs=3)
    assert names(tmp_path / "newest") == ["model.ckpt"]


def test_an_unknown_metric_is_an_error_by_steps_too(tmp_path: Path) -> None:
    with refuses(MetricError, "'train_lossy'"):
        fit(tmp_path, ModelCheckpoint(tmp_path / "kept", monitor="train_lossy", every_n_train_steps=1))


# ---- resuming --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_continues_with_the_best_checkpoints(tmp_path: Path) -> None:
    def train(epochs: int, resume: bool) -> ModelCheckpoint:
        saver = ModelCheckpoint(tmp_path / "kept", monitor="metric", save_top_k=2, save_last=True)
        trainer = quiet_trainer(tmp_path, saver, max_epochs=epochs)
        path = tmp_path / "kept" / "last.ckpt" if resume else None
        trainer.fit(Tiny({"metric": [3, 1, 2, 4]}), loader(), loader(4), ckpt_path=path)
        return saver

    train(2, resume=False)
    saver = train(4, resume=True)
    assert names(tmp_path / "kept") == ["epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"]
    assert saver.best_model_path == str(tmp_path / "kept" / "epoch=1-step=8.ckpt")
    assert progress(saver.last_model_path)["global_step"] == 16


class StopsBeforeValidation(Callback):
    """Fails before the validation after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("planted")


def test_a_save_that_waits_for_its_metric_is_made_by_the_resumed_run(tmp_path: Path) -> None:
    def train(root: Path, *callbacks: Callback, ckpt_path: str | None = None) -> list[str]:
        saver = ModelCheckpoint(
            root / "kept", monitor="metric", save_top_k=-1, save_last=True, every_n_train_steps=1, filename="{step}"
        )
        trainer = quiet_trainer(root, [*callbacks, saver], max_epochs=2, val_check_interval=2)
        trainer.fit(Tiny({"metric": [3, 1]}), loader(), loader(4), ckpt_path=ckpt_path)
        return names(root / "kept")

    expected = train(tmp_path / "whole")
    # ``last.ckpt`` of step 6 exists by then. step=6.ckpt needs the metric of the validation that fails.
    with pytest.raises(RuntimeError, match="planted"):
        train(tmp_path / "cut", StopsBeforeValidation(6))
    assert train(tmp_path / "cut", ckpt_path="last") == expected
    assert "step=6.ckpt" in expected


@pytest.mark.parametrize("given", ["path", "auto"])
def test_the_checkpoint_that_a_run_was_given_is_not_deleted(tmp_path: Path, given: str) -> None:
    def train(epochs: int, ckpt_path: str | None = None) -> str:
        saver = ModelCheckpoint(tmp_path / "kept")
        trainer = quiet_trainer(tmp_path, saver, max_epochs=epochs)
        trainer.fit(Tiny(), loader(), ckpt_path=ckpt_path)
        return os.path.basename(saver.best_model_path)

    first = train(1)
    last = train(3, str(tmp_path / "kept" / first) if given == "path" else "auto")
    assert names(tmp_path / "kept") == ([first, last] if given == "path" else [last])


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        # Not among the best two: nothing is saved, so nothing gives way.
        (2.5, ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt", "epoch=2-step=12.ckpt", "last.ckpt"]),
        (1.5, ["epoch=1-step=8.ckpt", "epoch=3-step=16.ckpt", "last.ckpt"]),
    ],
)
def test_a_resumed_run_may_keep_fewer(tmp_path: Path, value: float, kept: list[str]) -> None:
    def train(epochs: int, k: int, path: Path | None = None) -> None:
        saver = ModelCheckpoint(tmp_path / "kept", monitor="metric", save_top_k=k, save_last=True)
        trainer = quiet_trainer(tmp_path, saver, max_epochs=epochs)
        trainer.fit(Tiny({"metric": [3, 1, 2, value]}), loader(), loader(4), ckpt_path=path)

    train(3, -1)
    train(4, 2, tmp_path / "kept" / "last.ckpt")
    assert names(tmp_path / "kept") == kept


def test_what_was_deleted_since_is_forgotten_and_what_was_moved_is_found(tmp_path: Path) -> None:
    before = ModelCheckpoint(tmp_path / "kept", monitor="metric", save_top_k=3, save_last=True)
    fit(tmp_path, before, [3, 1, 2])
    checkpoint.remove(before.best_model_path)
    (tmp_path / "kept").rename(tmp_path / "moved")
    after = ModelCheckpoint(tmp_path / "moved", monitor="metric", save_top_k=3, save_last=True)
    after.load_state_dict(before.state_dict())
    fit(tmp_path, after, [5])
    kept = sorted((os.path.basename(path), float(score)) for path, score in after.best_k_models.items())
    assert kept == [("epoch=0-step=4-v1.ckpt", 5.0), ("epoch=0-step=4.ckpt", 3.0), ("epoch=2-step=12.ckpt", 2.0)]


def test_a_run_resumed_at_its_end_saves_again_what_was_deleted(tmp_path: Path) -> None:
    def fitted(ckpt_path: Path | None) -> None:
        saves = ModelCheckpoint(tmp_path / "saved", save_last=True)
        trainer = quiet_trainer(tmp_path, max_epochs=1, callbacks=[saves])
        trainer.fit(Tiny(), loader(), ckpt_path=ckpt_path)

    fitted(None)
    # As a snapshot in memory, which outlives the folder.
    (tmp_path / "saved" / "last.ckpt").rename(tmp_path / "elsewhere.ckpt")
    shutil.rmtree(tmp_path / "saved")
    fitted(tmp_path / "elsewhere.ckpt")
    assert not checkpoint.verify(tmp_path / "saved" / "last.ckpt")
    found = checkpoint.diff(tmp_path / "saved" / "last.ckpt", tmp_path / "elsewhere.ckpt")
    assert all(section.equal for section in found.sections.values())


def test_nothing_outside_its_directory_is_deleted(tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path / "first")
    fit(tmp_path, saver, max_epochs=1)
    other = ModelCheckpoint(tmp_path / "second")
    other.load_state_dict(saver.state_dict())
    fit(tmp_path, other, max_epochs=1)
    assert names(tmp_path / "first") == names(tmp_path / "second") == ["epoch=0-step=4.ckpt"]


def test_replaced_checkpoints_of_a_state_of_an_earlier_version_are_known(tmp_path: Path) -> None:
    saver = ModelCheckpoint(dirpath=tmp_path)
    state = saver.state_dict()
    del state["replaced"]
    saver.load_state_dict({**state, "giving_way": [str(tmp_path / "a.ckpt")]})
    assert saver.state_dict()["replaced"] == [str(tmp_path / "a.ckpt")]


def test_several_of_them_keep_their_states_apart(tmp_path: Path) -> None:
    savers = [ModelCheckpoint(tmp_path / "a", monitor="metric"), ModelCheckpoint(tmp_path / "b", every_n_train_steps=2)]
    trainer = quiet_trainer(tmp_path, savers, max_epochs=1)
    trainer.fit(Tiny({"metric": [1]}), loader(), loader(4))
    assert names(tmp_path / "a") == names(tmp_path / "b") == ["epoch=0-step=4.ckpt"]
    assert savers[0].state_key != savers[1].state_key


# ---- around it -------------------------------------------------------------------------------------------------------


def test_loggers_are_notified_and_a_failing_logger_does_not_end_the_run(tmp_path: Path) -> None:
    told: list[str] = []

    class Told(Logger):
        name = "told"
        version = 0

        def log_metrics(self, metrics: Any, step: int) -> None: ...

        def after_save_checkpoint(self, callback: Callback) -> None:
            assert isinstance(callback, ModelCheckpoint)
            told.append(callback.best_model_path)
            raise RuntimeError("no network")

    notes = fit(tmp_path, ModelCheckpoint(tmp_path / "kept"), max_epochs=1, logger=Told())
    assert told == [str(tmp_path / "kept" / "epoch=0-step=4.ckpt")]
    assert any("Told failed after a checkpoint (RuntimeError: no network)" in note for note in notes)


def test_saves_are_printed_if_verbose(tmp_path: Path) -> None:
    notes = fit(tmp_path, ModelCheckpoint(tmp_path / "kept", monitor="metric", verbose=True), [1, 2])
    assert [note for note in notes if note.startswith("Epoch")] == [
        "Epoch 0, step 4, metric = 1: saved epoch=0-step=4.ckpt.",
        "Epoch 1, step 8, metric = 2: not among the best 1.",
    ]


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"mode": "auto"}, "mode='auto'"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"save_top_k": 3}, "save_top_k=3"),
        ({"save_last": "yes"}, "save_last='yes'"),
        ({"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ({"train_time_interval": 60}, "train_time_interval=60"),
        ({"every_n_train_steps": 1, "every_n_epochs": 1}, "every_n_epochs"),
        ({"keep_last": -1}, "keep_last=-1"),
        ({"keep_every_nth": 0.5}, "keep_every_nth=0.5"),
        ({"filename": "{epoch"}, "filename="),
        ({"filename": "{metric:d}"}, "filename="),
        ({"filename": "{}"}, "filename='{}'"),
        ({"filename": "sub/{epoch}"}, "dirpath="),
    ],
)
def test_wrong_arguments_are_refused(settings: dict[str, Any], name: str) -> None:
    with refuses(ConfigurationError, name):
        ModelCheckpoint(**settings)


class Uneven(Tiny):
    """Logs, for steps alone, another value on each rank: rank 0 would save at steps 1 and 3, rank 1 at 2 and 4."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        rank = self.trainer.world.rank
        self.log("mine", float(-batch_idx if batch_idx % 2 == rank else 100))
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        return loss


def save_on_two_ranks(root: str) -> tuple[list[str], str]:
    saver = ModelCheckpoint(Path(root) / "kept", monitor="mine", every_n_train_steps=1, save_top_k=2, save_last=True)
    timed = ModelCheckpoint(Path(root) / "timed", train_time_interval=timedelta(0), save_top_k=-1)
    trainer = quiet_trainer(Path(root), [saver, timed], max_epochs=1, devices=2, strategy="ddp")
    trainer.fit(Uneven(), loader(32, 4))
    return sorted(os.path.basename(path) for path in saver.best_k_models), saver.best_model_path


def test_ranks_that_log_different_values_save_together_what_rank_0_logged(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, save_on_two_ranks, str(tmp_path))
    assert first == second
    assert names(tmp_path / "kept") == ["epoch=0-step=1.ckpt", "epoch=0-step=3.ckpt", "last.ckpt"]
    assert names(tmp_path / "timed") == ["epoch=0-step=2.ckpt", "epoch=0-step=4.ckpt"]
    for path in (tmp_path / "kept").iterdir():
        assert not checkpoint.verify(path)
