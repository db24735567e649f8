"""Idioms of code written for Lightning: super() calls of steps, validation switched off, types of errors and values."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from small_fits import Tiny, capturing, loader, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import DataModule, TrainModule
from phalanx.callbacks import EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from phalanx.framework.core.errors import ConfigurationError, MetricError
from phalanx.loggers import CSVLogger, TensorBoardLogger


def test_steps_of_the_base_class_take_the_index_of_a_loader(tmp_path: Path) -> None:
    class Predicting(Tiny):
        def forward(self, batch: Any) -> Any:
            return self.layer(batch[0])

        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return super().predict_step(batch, batch_idx, dataloader_idx)

    found = quiet_trainer(tmp_path, []).predict(Predicting(), [loader(4), loader(4)])
    assert found is not None
    assert [len(outputs) for outputs in found] == [1, 1]


def test_validation_that_is_switched_off_needs_no_loader(tmp_path: Path) -> None:
    class WithoutData(Tiny):
        def val_dataloader(self) -> Any:
            raise FileNotFoundError("no validation data here")

    trainer = quiet_trainer(tmp_path, [], max_epochs=1, limit_val_batches=0, val_check_interval=100)
    trainer.fit(WithoutData(), loader())
    assert trainer.global_step == 4


def test_a_value_that_cannot_be_logged_is_a_value_error(tmp_path: Path) -> None:
    class Odd(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("pair", torch.ones(2))
            return super().training_step(batch, batch_idx)

    with refuses(ValueError, "'pair'") as raised:
        quiet_trainer(tmp_path, [], max_epochs=1).fit(Odd(), loader())
    assert isinstance(raised.value, MetricError)


def test_the_epoch_of_a_table_and_metrics_of_the_progress_bar(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(tmp_path, [], max_epochs=2, logger=logger, log_every_n_steps=1)
    trainer.fit(Tiny({"metric": [1.0]}), loader(), loader(4))
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        assert {row["epoch"] for row in csv.DictReader(file)} == {"0", "1"}
    shown = {name: type(value) for name, value in trainer.progress_bar_metrics.items()}
    assert shown == {"train_loss_step": float, "train_loss_epoch": float}


# ---- values that are read ------------------------------------------------------------------------------------------


def test_the_log_directory_before_a_fit_and_without_a_logger(tmp_path: Path) -> None:
    assert quiet_trainer(tmp_path, []).log_dir == str(tmp_path)
    trainer = quiet_trainer(tmp_path, [], logger=CSVLogger(), max_epochs=1)
    for version in (0, 1):
        # Before the fit that of the next run, after it that of the run.
        assert trainer.log_dir == str(tmp_path / "phalanx_logs" / f"version_{version}")
        trainer.fit(Tiny(), loader())
        assert trainer.log_dir == str(tmp_path / "phalanx_logs" / f"version_{version}")
        assert Path(trainer.log_dir, "metrics.csv").exists()
        trainer = quiet_trainer(tmp_path, [], logger=CSVLogger(), max_epochs=1)


def test_loggers_that_are_set_later(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, [], max_epochs=1)
    trainer.logger = logger = CSVLogger()
    assert trainer.loggers == [logger]
    trainer.fit(Tiny(), loader())
    assert Path(logger.log_dir, "metrics.csv").is_relative_to(tmp_path)
    trainer.logger = None
    assert trainer.loggers == []


@pytest.mark.parametrize(("given", "read"), [(3, 3), (1, True), (0, False), (False, False)])
def test_the_number_of_batches_of_a_dev_run(tmp_path: Path, given: Any, read: Any) -> None:
    found = quiet_trainer(tmp_path, [], fast_dev_run=given).fast_dev_run
    assert (found, type(found)) == (read, type(read))


def test_the_rates_of_groups_that_are_added_in_a_fit(tmp_path: Path) -> None:
    class Growing(Tiny):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.optimizers().add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.5})

    monitor = LearningRateMonitor(logging_interval="epoch")
    quiet_trainer(tmp_path, monitor, max_epochs=3, logger=CSVLogger()).fit(Growing(), loader())
    assert monitor.lrs["lr-SGD/pg2"][-1] == 0.5


def test_the_worst_of_all_checkpoints(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, monitor="metric", save_top_k=-1)
    quiet_trainer(tmp_path, checkpoint, max_epochs=3).fit(Tiny({"metric": [2.0, 3.0, 1.0]}), loader(), loader(4))
    assert Path(checkpoint.kth_best_model_path).name == "epoch=1-step=8.ckpt"
    assert (float(checkpoint.kth_value), len(checkpoint.best_k_models)) == (3.0, 3)


def test_the_schedule_of_an_average_without_a_run() -> None:
    average = EMAWeightAveraging(update_every_n_steps=2, update_starting_at_step=3)
    assert [step for step in range(8) if average.should_update(step_idx=step)] == [4, 6]


def test_freezing_returns_the_module() -> None:
    module = Tiny()
    assert module.freeze() is module
    assert not module.layer.weight.requires_grad
    assert module.unfreeze() is module


# ---- loggers and data modules --------------------------------------------------------------------------------------


def test_a_logger_with_a_variable_and_without_hyperparameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_ROOT", str(tmp_path / "logs"))
    logger = TensorBoardLogger(os.path.join("$LOG_ROOT", "here"))
    assert logger.save_dir == str(tmp_path / "logs" / "here")
    quiet_trainer(tmp_path, [], max_epochs=1, logger=logger).fit(Tiny(), loader())
    assert Path(logger.log_dir, "hparams.yaml").read_text() == "{}\n"
    CSVLogger(tmp_path).log_hyperparams()


def test_a_data_module_from_datasets_receives_their_arguments() -> None:
    class Sized(DataModule):
        def __init__(self, batch_size: int = 1) -> None:
            self.batch_size = batch_size

    class Open(DataModule):
        def __init__(self, **arguments: Any) -> None:
            self.arguments = arguments

    rows = TensorDataset(torch.ones(4, 2))
    assert Sized.from_datasets(rows, batch_size=4, num_workers=1).batch_size == 4
    assert Open.from_datasets(rows, batch_size=4).arguments == {"batch_size": 4, "num_workers": 0}
    assert str(DataModule.from_datasets(rows, val_dataset=rows)) == "DataModule(train_dataloader, val_dataloader)"


# ---- a fit ---------------------------------------------------------------------------------------------------------


class WithoutStep(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithLoader(WithoutStep):
    def val_dataloader(self) -> Any:
        raise AssertionError("never requested")


@pytest.mark.parametrize(("kind", "given"), [(WithoutStep, [loader()]), (WithLoader, [])])
def test_a_validation_loader_without_a_step_is_reported(kind: Any, given: list[Any], tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, [], max_epochs=1)
    notes = capturing(trainer)
    trainer.fit(kind(), loader(), *given)
    assert trainer.global_step == 4
    (note,) = (note for note in notes if "validation_step" in note)
    assert f"but {kind.__name__} has no validation_step, so this fit does not" in note
    # Not where the module has none on purpose.
    module, silent = kind(), quiet_trainer(tmp_path, [], max_epochs=1)
    module.validation_step = None
    notes = capturing(silent)
    silent.fit(module, loader(), *given)
    assert not any("validation_step" in note for note in notes)


def test_overfitting_has_precedence_over_limits_and_validates_in_order(tmp_path: Path) -> None:
    seen = []

    class Watching(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.extend(batch[0].flatten().tolist())

    rows = torch.arange(8.0).reshape(8, 1)
    shuffled = DataLoader(TensorDataset(rows), batch_size=2, shuffle=True)
    limits = {"limit_train_batches": 3, "limit_val_batches": 1, "limit_test_batches": 1}
    trainer = quiet_trainer(tmp_path, [], max_epochs=1, overfit_batches=2, **limits)
    trainer.fit(Watching(), loader(), shuffled)
    assert seen == [0.0, 1.0, 2.0, 3.0]
    assert (trainer.num_training_batches, trainer.num_val_batches) == (2, [2])
    assert (trainer.limit_train_batches, trainer.limit_val_batches, trainer.limit_test_batches) == (2, 2, 1)


def test_without_an_optimizer_the_next_step_is_given_and_works(tmp_path: Path) -> None:
    class Without(Tiny):
        def configure_optimizers(self) -> Any:
            return None

    with refuses(ConfigurationError, "configure_optimizers", "automatic_optimization"):
        quiet_trainer(tmp_path, [], max_epochs=1).fit(Without(), loader())
    module = Without()
    module.automatic_optimization = False
    trainer = quiet_trainer(tmp_path, [], max_epochs=1)
    trainer.fit(module, loader())
    assert (trainer.current_epoch, trainer.global_step) == (1, 0)


class Counting:
    """A scheduler of its own kind."""

    count = 0

    def advance(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Scheduling(Tiny):
    def configure_optimizers(self) -> Any:
        self.scheduler = Counting()
        return [torch.optim.SGD(self.parameters(), lr=0.1)], [self.scheduler]


class ByHand(Scheduling):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.lr_schedulers().advance()


class ByHook(Scheduling):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.advance()


@pytest.mark.parametrize(("kind", "count"), [(ByHand, 8), (ByHook, 2)])
def test_a_scheduler_that_the_module_advances_needs_no_step(kind: Any, count: int, tmp_path: Path) -> None:
    module, trainer = kind(), quiet_trainer(tmp_path, [], max_epochs=2)
    trainer.fit(module, loader())
    assert module.scheduler.count == count
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    again = kind()
    quiet_trainer(tmp_path, [], max_epochs=3).fit(again, loader(), ckpt_path=tmp_path / "saved.ckpt")
    assert again.scheduler.count == count / 2 * 3


def test_another_scheduler_without_step_is_refused(tmp_path: Path) -> None:
    with refuses(ConfigurationError, "Counting", "lr_scheduler_step"):
        quiet_trainer(tmp_path, [], max_epochs=1).fit(Scheduling(), loader())


def test_a_step_that_takes_an_iterator_is_refused(tmp_path: Path) -> None:
    class Iterating(Tiny):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            return super().training_step(*next(dataloader_iter))

    with refuses(ConfigurationError, "Iterating.training_step", "dataloader_iter"):
        quiet_trainer(tmp_path, [], max_epochs=1).fit(Iterating(), loader())
