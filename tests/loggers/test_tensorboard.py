"""``TensorBoardLogger``: read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.framework.api.train_module import TrainModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.loggers import TensorBoardLogger


class Example(TrainModule):
    """A module some of whose properties hold only while a run is under way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.example_input_array = torch.ones(1, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(rows)
        return found


def events(directory: str) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(directory)
    accumulator.Reload()
    return accumulator


def test_metrics_are_read_back(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, "exp", prefix="p", sub_dir="train")
    logger.log_metrics({"loss": 0.5, "acc": torch.tensor(0.25)}, 10)
    logger.log_metrics({"loss": 0.75})
    logger.experiment.add_histogram("weights", torch.ones(4), 1)
    logger.finalize("success")
    assert logger.log_dir == str(tmp_path / "exp" / "version_0" / "train")
    read = events(logger.log_dir)
    assert [(event.step, event.value) for event in read.Scalars("p-loss")] == [(10, 0.5), (11, 0.75)]
    assert read.Scalars("p-acc")[0].value == 0.25
    assert read.Tags()["histograms"] == ["weights"]


def test_hyperparameters_reach_the_table_with_their_metrics(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path)
    logger.log_hyperparams({"lr": 0.1, "model": {"depth": 2, "kind": None}}, {"val_acc": 0.5})
    logger.finalize("success")
    read = events(logger.log_dir)
    assert read.Scalars("val_acc")[0].value == 0.5
    start = read.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for text in (b"lr", b"model/depth", b"model/kind"):
        assert text in start
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == "lr: 0.1\nmodel: {depth: 2, kind: null}\n"


@pytest.mark.parametrize(("default", "shown"), [(True, ["hp_metric"]), (False, [])])
def test_the_placeholder_metric_can_be_turned_off(tmp_path: Path, default: bool, shown: list[str]) -> None:
    logger = TensorBoardLogger(tmp_path, default_hp_metric=default)
    logger.log_hyperparams({"lr": 0.1})
    logger.finalize("success")
    assert events(logger.log_dir).Tags()["scalars"] == shown


def test_the_graph_is_recorded_where_asked_for(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    with pytest.warns(UserWarning, match="example_input_array is NoneType"):
        logger.log_graph(model)
    logger.log_graph(model, torch.ones(1, 2))
    logger.finalize("success")
    assert events(logger.log_dir).Tags()["graph"]
    logger = TensorBoardLogger(tmp_path, log_graph=True)
    logger.log_graph(Example())
    logger.finalize("success")
    assert events(logger.log_dir).Tags()["graph"]
    TensorBoardLogger(tmp_path / "none").log_graph(model, torch.ones(1, 2))
    assert not (tmp_path / "none").exists()


class Traced(Example):
    """A module that logs in its forward pass, which is traced before the first hook in which values are gathered."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.log("rows", len(rows))
        return super().forward(rows)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


def fitted_with_graph(strategy: str, root: str) -> None:
    logger = TensorBoardLogger(root, "graph", version=0, log_graph=True)
    trainer = silent_trainer(strategy=strategy, devices=2, max_epochs=1, log_every_n_steps=1, logger=logger)
    trainer.fit(Traced(), DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_a_graph_that_cannot_be_recorded_costs_no_metric(tmp_path: Path, strategy: str) -> None:
    run_on_ranks(2, fitted_with_graph, strategy, str(tmp_path))
    found = events(str(tmp_path / "graph" / "version_0"))
    assert len(found.Scalars("loss")) == 2
    assert found.Tags()["graph"] == (strategy == "ddp")


@pytest.mark.parametrize(("name", "closest"), [("root_dir", "save_dir"), ("flush_sec", "flush_secs")])
def test_an_unknown_argument_is_refused_when_the_logger_is_built(name: str, closest: str) -> None:
    with refuses(ConfigurationError, f"{name}=3", f"'{closest}'"):
        TensorBoardLogger(**{name: 3})  # type: ignore[arg-type]
