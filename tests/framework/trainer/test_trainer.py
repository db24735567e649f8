"""A Trainer through its life: before, in and after its stages, several runs in one process, and after an error."""

from __future__ import annotations

import copy
import gc
import math
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

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

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


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


def fitted_twice(strategy: str) -> list[tuple[Any, ...]]:
    trainer = silent_trainer(devices=2, max_epochs=1, strategy=strategy)
    found = []
    for _ in range(2):
        module = Evaluated()
        trainer.fit(module, loader(), loader(16))
        found.append((module.global_step, module.global_rank, trainer.num_val_batches, len(trainer.optimizers)))
        trainer.validate(dataloaders=loader(16), verbose=False)
    return found


@pytest.mark.parametrize(("strategy", "optimizers"), [("ddp", 1), ("fsdp", 0)])
def test_several_runs_on_several_ranks(strategy: str, optimizers: int) -> None:
    assert run_on_ranks(2, fitted_twice, strategy) == [[(8, rank, [2], optimizers)] * 2 for rank in range(2)]


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
        assert trainer.ckpt_path == saver.best_model_path
    trainer.validate(Evaluated(), loader(16), verbose=False)
    assert trainer.ckpt_path is None
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
        self.evaluated = trainer.num_val_batches, trainer.evaluating

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._look(trainer, "test")

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._look(trainer, "predict")


def test_what_a_callback_reads_of_the_stage() -> None:
    looking = Looking()
    trainer = silent_trainer(devices=1, max_epochs=1, callbacks=[looking], num_sanity_val_steps=1)
    trainer.fit(Evaluated(), loader(8), loader(8))
    trainer.validate(dataloaders=loader(16), verbose=False)
    assert looking.evaluated == ([4], True)
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
    assert (trainer.optimizers, trainer.lr_schedulers, trainer.lr_scheduler_configs) == ([], [], [])
    assert (trainer.loggers, trainer.logger) == ([], None)
    assert (trainer.precision, trainer.strategy.name) == ("bf16-mixed", "single")
    assert trainer.early_stopping_callback is trainer.checkpoint_callback is None
    assert trainer.model is trainer.lightning_module is None
    assert trainer.train_dataloader is trainer.val_dataloaders is trainer.test_dataloaders is None
    assert trainer.predict_dataloaders is trainer.ckpt_path is None
    assert trainer.num_training_batches == math.inf
    assert trainer.num_val_batches == trainer.num_sanity_val_batches == trainer.num_test_batches == []
    assert trainer.num_predict_batches == []
    assert not trainer.should_stop
    assert not trainer.evaluating
    with pytest.raises(ConfigurationError):
        _ = trainer.module
    with refuses(ConfigurationError, "estimated_stepping_batches", "configure_optimizers"):
        _ = trainer.estimated_stepping_batches
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
    assert (module.current_epoch, module.global_step, module.global_rank, module.local_rank) == (0, 0, 0, 0)
    assert (module.logger, module.loggers) == (None, [])
    assert module.device == torch.device("cpu")


def test_module_and_trainer_after_a_fit(tmp_path: Path) -> None:
    trainer = silent_trainer(
        devices=1, max_epochs=2, accumulate_grad_batches=2, default_root_dir=tmp_path, logger="csv",
        num_sanity_val_steps=1,
    )  # fmt: skip
    module, train = Evaluated(), loader(16)
    val: list[Any] = [loader(8), loader(16)]
    trainer.fit(module, train, val[0])
    assert module.trainer is trainer
    assert module.logger is trainer.logger is not None
    assert module.optimizers() is trainer.optimizers[0]
    assert module.lr_schedulers() is trainer.lr_scheduler_configs[0].scheduler
    assert (module.global_step, module.current_epoch, module.global_rank) == (4, 2, 0)
    assert trainer.model is module
    assert trainer.train_dataloader is train
    assert trainer.val_dataloaders is val[0]
    assert (trainer.num_training_batches, trainer.num_val_batches) == (4, [2])
    assert (trainer.num_sanity_val_batches, trainer.estimated_stepping_batches) == ([1], 4)
    trainer.validate(module, val, verbose=False)
    assert trainer.val_dataloaders == val
    assert trainer.num_val_batches == [2, 4]
    trainer.test(module, val[0], verbose=False)
    assert trainer.test_dataloaders is val[0]
    assert trainer.num_test_batches == [2]
    # The evaluations leave those of the fit.
    assert trainer.train_dataloader is train
    assert module.optimizers() is trainer.optimizers[0]


def test_the_run_ends_with_the_stage(tmp_path: Path) -> None:
    """The run and its sources, which hold iterators and workers, are free although module and Trainer are in use."""
    refs: list[weakref.ref[Any]] = []

    class Watching(Callback):
        def on_train_batch_start(self, trainer: Any, module: TrainModule, batch: Any, batch_idx: int) -> None:
            refs[:] = map(weakref.ref, (trainer.run, trainer.loop, trainer.loop.windows.source))

    data = DataLoader(regression_data(8), 4, num_workers=1, persistent_workers=True)
    trainer = silent_trainer(devices=1, max_epochs=1, callbacks=[Watching()], default_root_dir=tmp_path)
    module = Evaluated()
    trainer.fit(module, data, loader(8))
    assert module.trainer.train_dataloader is data
    # At once, since torch stops the workers of an iterator only if its last reference frees it.
    assert refs.pop()() is None
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def outlives_its_fit(strategy: str) -> bool:
    module = Evaluated()
    silent_trainer(strategy=strategy, devices="auto", max_steps=4).fit(module, loader(32))
    ref = weakref.ref(module)
    del module
    gc.collect()
    return ref() is not None


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_nothing_refers_to_a_module_after_its_fit(strategy: str) -> None:
    """Models, and the threads of their process groups, would add up in a process that fits many."""
    assert run_on_ranks(2, outlives_its_fit, strategy) == [False, False]


def test_copies_do_not_hold_the_trainer() -> None:
    module = Evaluated()
    silent_trainer(devices=1, max_epochs=1).fit(module, loader(8))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        with refuses(ConfigurationError, "Evaluated", "module.trainer"):
            _ = other.trainer


def test_a_trainer_set_in_a_test() -> None:
    module, trainer = Evaluated(), silent_trainer(devices=1, max_epochs=1)
    module.trainer = trainer
    assert module.trainer is trainer
    assert (module.global_step, module.optimizers(), module.lr_schedulers()) == (0, [], None)
    loss = module.training_step(next(iter(loader(8))), 0)
    assert isinstance(loss, Tensor)
    module.manual_backward(loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    norm = module.clip_gradients(optimizer, 1e-3)
    assert norm is not None
    assert norm > 1e-3
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert torch.nn.utils.get_total_norm(gradients) <= 1e-3
    module.clip_gradients(optimizer, 1e-5, "value")
    assert all(gradient.abs().max() <= 1e-5 for gradient in gradients)
    module.trainer = None
    with refuses(ConfigurationError, "Evaluated", "module.trainer"):
        _ = module.trainer
    module.trainer = trainer
    trainer.fit(module, loader(8))
    assert module.trainer is trainer


def test_a_trainer_is_not_replaced_during_a_run() -> None:
    class Replacing(Evaluated):
        def on_train_start(self) -> None:
            self.trainer = silent_trainer(devices=1)

    with refuses(ConfigurationError, "module.trainer"):
        silent_trainer(devices=1, max_epochs=1).fit(Replacing(), loader(8))
