"""Idioms of code written for Lightning: super() calls of steps, validation switched off, types of errors and values."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from small_fits import Tiny, loader, quiet_trainer

from phalanx.framework.core.errors import MetricError
from phalanx.loggers import CSVLogger


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

    with pytest.raises(ValueError, match="pair") as raised:
        quiet_trainer(tmp_path, [], max_epochs=1).fit(Odd(), loader())
    assert isinstance(raised.value, MetricError)


def test_the_epoch_in_a_table_of_metrics_is_a_whole_number(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    trainer = quiet_trainer(tmp_path, [], max_epochs=2, logger=logger, log_every_n_steps=1)
    trainer.fit(Tiny({"metric": [1.0]}), loader(), loader(4))
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        assert {row["epoch"] for row in csv.DictReader(file)} == {"0", "1"}
