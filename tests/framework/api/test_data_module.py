"""A DataModule in a run: who is asked for what, how often, and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import Tensor

from phalanx import DataModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.loggers import CSVLogger


class Evaluating(Regressor):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", 2.0)

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        output: Tensor = batch[0][:, 0]
        return output


class Noting(DataModule):
    """Notes its calls; ``folder`` gets a file for each call of prepare_data."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self.folder = folder
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")
        if self.folder is not None:
            rank = self.trainer.global_rank if self.trainer is not None else -1
            (self.folder / f"rank{rank}").touch()

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")
        if self.folder is not None:
            assert list(self.folder.iterdir()), "data is prepared before any rank sets it up"

    def train_dataloader(self) -> Any:
        self.calls.append("train")
        return loader(16)

    def val_dataloader(self) -> Any:
        self.calls.append("val")
        return loader(8)

    def test_dataloader(self) -> Any:
        self.calls.append("test")
        return loader(8)

    def predict_dataloader(self) -> Any:
        self.calls.append("predict")
        return loader(8)

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")


def test_what_is_asked_of_a_data_module_and_when() -> None:
    data, module = Noting(), Evaluating()
    trainer = silent_trainer(devices=1, max_epochs=1)
    trainer.fit(module, datamodule=data)
    assert data.calls == ["prepare_data", "setup fit", "train", "val", "teardown fit"]
    assert trainer.datamodule is data
    assert data.trainer is trainer
    for stage, hook in (("validate", "val"), ("test", "test"), ("predict", "predict")):
        with refuses(ConfigurationError, stage):
            getattr(silent_trainer(), stage)(Evaluating())
        data.calls.clear()
        # The module and its data are those of the last run.
        getattr(trainer, stage)()
        assert data.calls == ["prepare_data", f"setup {stage}", hook, f"teardown {stage}"]


def test_loaders_that_are_given_come_first() -> None:
    class Own(Evaluating):
        def train_dataloader(self) -> Any:
            raise AssertionError("a loader was given")

    trainer = silent_trainer(devices=1, max_epochs=1)
    trainer.fit(Own(), loader(8))
    assert trainer.global_step == 2
    # A data module, also in the place of the loaders.
    given: list[dict[str, Any]] = [{"datamodule": Noting()}, {"train_dataloaders": Noting()}]
    for each in given:
        trainer.fit(Own(), **each)
        assert trainer.global_step == 4
    assert trainer.test(Evaluating(), Noting(), verbose=False) == [{"test_loss": 2.0}]


def test_transfer_hooks_of_a_data_module() -> None:
    class Doubling(Noting):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [part + 1 for part in batch]

        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return [part.to(device) * 2 for part in batch]

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [part + 3 for part in batch]

    trainer = silent_trainer(devices=1)
    predictions = trainer.predict(Evaluating(), datamodule=Doubling())
    assert predictions is not None
    plain = torch.cat([batch[0][:, 0] for batch in loader(8)])
    torch.testing.assert_close(torch.cat(predictions), (plain + 1) * 2 + 3)


def prepared(folder: str) -> list[str]:
    data = Noting(Path(folder))
    silent_trainer(devices=2, max_epochs=1).fit(Evaluating(), datamodule=data)
    return data.calls


def test_data_is_prepared_once_on_a_node(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, prepared, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["rank0"]
    assert "prepare_data" in first
    assert "prepare_data" not in second


# ---- hyperparameters and errors ------------------------------------------------------------------------------------


class Rows(DataModule):
    def __init__(self, size: int = 8, lr: float = 0.05, weights: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.errors: list[BaseException] = []

    def train_dataloader(self) -> Any:
        return loader(self.hparams.size)

    def on_exception(self, exception: BaseException) -> None:
        self.errors.append(exception)
        raise KeyError("in the hook")


class WithWeights(Regressor):
    def __init__(self, weights: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_its_hyperparameters_are_logged_with_those_of_the_module(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    silent_trainer(devices=1, max_epochs=1, logger=logger).fit(Regressor(), datamodule=Rows())
    written = Path(logger.log_dir, "hparams.yaml").read_text()
    assert set(written.splitlines()) >= {"size: 8", "lr: 0.05", "dropout: 0.0"}


@pytest.mark.parametrize(
    ("module", "data"),
    [
        (Regressor(lr=0.5), Rows()),
        (Regressor(lr=1), Rows(lr=1.0)),
        (WithWeights(torch.ones(2)), Rows(weights=torch.zeros(2))),
    ],
)
def test_one_hyperparameter_with_two_values_is_refused(module: Any, data: Rows, tmp_path: Path) -> None:
    with refuses(ConfigurationError, "ignore="):
        silent_trainer(devices=1, max_epochs=1, logger=CSVLogger(tmp_path)).fit(module, datamodule=data)
    assert not list(tmp_path.iterdir())
    # There is no conflict without a logger, and of equal tensors.
    silent_trainer(devices=1, max_epochs=1).fit(module, datamodule=data)
    module, data = WithWeights(torch.ones(2)), Rows(weights=torch.ones(2))
    silent_trainer(devices=1, max_epochs=1, logger=CSVLogger(tmp_path)).fit(module, datamodule=data)


def test_an_error_is_passed_to_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Failing(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("in the step")

    data = Rows()
    with pytest.raises(RuntimeError, match="in the step"):
        silent_trainer(devices=1, max_epochs=1).fit(Failing(), datamodule=data)
    assert [str(error) for error in data.errors] == ["in the step"]
    assert "Rows.on_exception failed: KeyError: 'in the hook'" in capsys.readouterr().out
