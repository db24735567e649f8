"""A Trainer through its life: several runs in one process, what it shows of them, and what remains after an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Callback, Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.core.errors import CheckpointError, ConfigurationError


class Evaluated(Regressor):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = self(batch[0])
        return output


def test_all_stages_in_a_row(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2, default_root_dir=tmp_path, enable_progress_bar=False, logger="csv"
    )
    module = Evaluated()
    trainer.fit(module, loader(), loader(16))
    (validated,) = trainer.validate(dataloaders=loader(16), verbose=False)
    (tested,) = trainer.test(dataloaders=loader(16), verbose=False)
    assert validated["val_loss"] == pytest.approx(tested["test_loss"])
    assert trainer.current_epoch == 2
    assert trainer.global_step == 32
    predictions = trainer.predict(dataloaders=loader(16))
    assert predictions is not None
    assert torch.cat(predictions).shape == (16, 1)
    assert trainer.predict(dataloaders=loader(16), return_predictions=False) is None
    # One run, one directory.
    assert [path.name for path in (tmp_path / "phalanx_logs").iterdir()] == ["version_0"]
    assert trainer.state.finished


def test_a_second_fit_starts_again_in_a_new_directory(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, default_root_dir=tmp_path, enable_progress_bar=False, logger=False
    )
    weights = []
    for _ in range(2):
        module = Evaluated()
        trainer.fit(module, loader())
        assert (trainer.global_step, trainer.current_epoch) == (16, 1)
        weights.append(weights_of(module))
    assert torch.equal(*weights)
    assert {path.name for path in (tmp_path / "phalanx_logs").iterdir()} == {"version_0", "version_1"}


def fitted_twice() -> list[int]:
    trainer = silent_trainer(devices=2, max_epochs=1)
    steps = []
    for _ in range(2):
        trainer.fit(Evaluated(), loader(), loader(16))
        steps.append(trainer.global_step)
        trainer.validate(dataloaders=loader(16), verbose=False)
    return steps


def test_several_runs_on_several_ranks() -> None:
    assert run_on_ranks(2, fitted_twice) == [[8, 8], [8, 8]]


def test_evaluating_a_checkpoint(tmp_path: Path) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=2, default_root_dir=tmp_path, enable_progress_bar=False, logger=False,
        callbacks=[ModelCheckpoint(monitor="val_loss", save_last=True)],
    )  # fmt: skip
    trainer.fit(Evaluated(), loader(), loader(16))
    saver = trainer.checkpoint_callback
    assert isinstance(saver, ModelCheckpoint)
    best = float(saver.best_model_score) if saver.best_model_score is not None else None
    for given in ("best", saver.best_model_path, Path(saver.best_model_path)):
        fresh = Evaluated()
        (metrics,) = trainer.validate(fresh, loader(16), ckpt_path=given, verbose=False)
        assert metrics["val_loss"] == pytest.approx(best)
    assert trainer.test(Evaluated(), loader(16), ckpt_path="last", verbose=False)
    with refuses(CheckpointError, "nowhere"):
        trainer.test(Evaluated(), loader(16), ckpt_path=tmp_path / "nowhere")
    with refuses(CheckpointError, "ckpt_path='best'", "ModelCheckpoint", "empty"):
        silent_trainer(default_root_dir=tmp_path / "empty").test(Evaluated(), loader(16), ckpt_path="best")
    # Of a Trainer that has fitted and saved nothing, the best checkpoint is not that of another run.
    unsaved = silent_trainer(default_root_dir=tmp_path, max_steps=1)
    unsaved.test(Evaluated(), loader(16), ckpt_path="best", verbose=False)
    unsaved.fit(Evaluated(), loader())
    with refuses(CheckpointError, "ckpt_path='best'", "ModelCheckpoint"):
        unsaved.test(Evaluated(), loader(16), ckpt_path="best")


def test_the_last_checkpoint_is_read_as_often_as_one_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = silent_trainer(
        default_root_dir=tmp_path, max_epochs=1, callbacks=[ModelCheckpoint()], enable_checkpointing=None
    )
    first.fit(Evaluated(), loader())
    saver = first.checkpoint_callback
    assert isinstance(saver, ModelCheckpoint)
    opened: list[str] = []
    open_file = os.open

    def count(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path).endswith(".safetensors"):
            opened.append(str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", count)
    counts = []
    for given in (saver.best_model_path, "last"):
        silent_trainer(default_root_dir=tmp_path, max_epochs=2).fit(Evaluated(), loader(), ckpt_path=given)
        counts.append(len(opened))
        silent_trainer(default_root_dir=tmp_path).validate(Evaluated(), loader(16), ckpt_path=given, verbose=False)
        counts.append(len(opened))
        opened.clear()
    assert counts[0] > 0
    assert counts[:2] == counts[2:]


class Looking(Callback):
    """Notes what the Trainer says it is doing."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def _look(self, trainer: Trainer, where: str) -> None:
        names = ("training", "validating", "testing", "predicting", "sanity_checking")
        self.seen.append((where, " ".join(name for name in names if getattr(trainer, name))))

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look(trainer, f"train, last: {trainer.is_last_batch}")

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._look(trainer, "validation")

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._look(trainer, "test")

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._look(trainer, "predict")


def test_what_a_callback_reads_of_the_stage() -> None:
    looking = Looking()
    trainer = silent_trainer(devices=1, max_epochs=1, callbacks=[looking], num_sanity_val_steps=1)
    trainer.fit(Evaluated(), loader(8), loader(8))
    trainer.validate(dataloaders=loader(8), verbose=False)
    trainer.test(dataloaders=loader(8), verbose=False)
    trainer.predict(dataloaders=loader(8))
    assert [stage for _, stage in looking.seen] == [
        "sanity_checking", "training", "training", "validating", "validating", "testing", "predicting",
    ]  # fmt: skip
    assert not trainer.training


def test_what_a_trainer_shows_without_a_run() -> None:
    trainer = silent_trainer(devices=1, max_epochs=3, max_steps=7, accumulate_grad_batches=2, precision="bf16")
    assert (trainer.max_epochs, trainer.max_steps, trainer.min_epochs, trainer.min_steps) == (3, 7, None, None)
    assert (trainer.world_size, trainer.num_devices, trainer.num_nodes, trainer.node_rank) == (1, 1, 1, 0)
    assert (trainer.global_rank, trainer.local_rank, trainer.is_global_zero) == (0, 0, True)
    assert (trainer.current_epoch, trainer.global_step, trainer.callback_metrics) == (0, 0, {})
    assert (trainer.optimizers, trainer.lr_schedulers, trainer.loggers, trainer.logger) == ([], [], [], None)
    assert (trainer.precision, trainer.strategy.name) == ("bf16-mixed", "single")
    assert trainer.early_stopping_callback is None
    assert trainer.checkpoint_callback is None
    assert not trainer.should_stop
    for name in ("module", "estimated_stepping_batches"):
        with pytest.raises(ConfigurationError):
            getattr(trainer, name)
    with refuses(ConfigurationError, "save_checkpoint"):
        trainer.save_checkpoint("x.ckpt")


def test_an_error_leaves_module_and_trainer_usable(tmp_path: Path) -> None:
    seen: list[str] = []

    class Watching(Callback):
        def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
            seen.append(str(exception))

    class Failing(Evaluated):
        fails = True

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.fails and batch_idx == 2:
                raise RuntimeError("on purpose")

    trainer = Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, callbacks=[Watching()], enable_progress_bar=False
    )
    module = Failing()
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.fit(module, loader())
    assert seen == ["on purpose"]
    assert trainer.interrupted
    assert (trainer.global_step, module.global_step) == (3, 3)
    module.fails = False
    trainer.fit(module, loader())
    assert trainer.state.finished


def test_a_module_alone_says_what_it_needs() -> None:
    module = Evaluated()
    for use in (lambda: module.trainer, lambda: module.optimizers(), lambda: module.fabric):
        with refuses(ConfigurationError, "Evaluated", "module.trainer"):
            use()
    module.log("free", 1.0)
    assert (module.current_epoch, module.global_step, module.global_rank) == (0, 0, 0)
    assert module.device == torch.device("cpu")
