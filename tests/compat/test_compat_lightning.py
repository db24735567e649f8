"""Aliases of Lightning: programs run with their import lines changed, each public name exists or explains itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_script

import phalanx
from phalanx.compat import lightning as compat
from phalanx.compat.lightning import aliases

pytest.importorskip("lightning.pytorch")

MODULES = ("", ".callbacks", ".core", ".loggers", ".strategies", ".trainer")
# Helpers for authors of Lightning itself.
UTILITIES_LEFT_OUT = {
    *("GradClipAlgorithmType", "LightningEnum", "disable_possible_user_warnings", "find_shared_parameters"),
    *("is_picklable", "is_shared_filesystem", "set_shared_parameters", "suggested_max_num_workers"),
}

PROGRAM = """
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import {lightning} as pl
from {lightning} import LightningDataModule, LightningModule, Trainer, seed_everything
from {lightning}.callbacks import Callback, EarlyStopping, ModelCheckpoint
from {lightning}.callbacks.lr_monitor import LearningRateMonitor
from {lightning}.loggers import CSVLogger
from {lightning}.utilities import grad_norm, rank_zero_only
from {lightning}.utilities.types import STEP_OUTPUT, OptimizerLRScheduler


class Data(LightningDataModule):
    def setup(self, stage: str) -> None:
        torch.manual_seed(1)
        x = torch.randn(48, 6)
        self.samples = TensorDataset(x, (x.sum(1) > 0).long())

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=8)

    def val_dataloader(self):
        return DataLoader(self.samples, batch_size=16)


class Classifier(LightningModule):
    def __init__(self, width: int = 16, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx) -> STEP_OUTPUT:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log("norm", grad_norm(self, 2)["grad_2.0_norm_total"])

    def validation_step(self, batch, batch_idx) -> STEP_OUTPUT:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {{"optimizer": optimizer, "lr_scheduler": {{"scheduler": scheduler, "interval": "epoch"}}}}


class Losses(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(trainer.callback_metrics["train_loss"]))

    @rank_zero_only
    def on_validation_end(self, trainer, pl_module):
        self.seen.append(float(trainer.callback_metrics["val_loss"]))


def main(folder, **trainer):
    seed_everything(3)
    losses, saved = Losses(), ModelCheckpoint(monitor="val_loss", filename="best", dirpath=Path(folder) / "saved")
    trainer = Trainer(
        max_epochs=3, accelerator="cpu", logger=CSVLogger(folder), enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, log_every_n_steps=1, accumulate_grad_batches=2,
        gradient_clip_val=0.5, callbacks=[losses, saved, LearningRateMonitor(), EarlyStopping("val_loss", patience=5)],
        **trainer,
    )
    module = Classifier()
    trainer.fit(module, datamodule=Data())
    best = Classifier.load_from_checkpoint(saved.best_model_path)
    metrics = trainer.validate(best, datamodule=Data(), verbose=False)
    return losses.seen, metrics, {{name: value.clone() for name, value in module.state_dict().items()}}
"""


def run_program(lightning: str, folder: Path, **trainer: Any) -> Any:
    """Run the program with one of the two libraries; return its losses, metrics and final weights."""
    namespace: dict[str, Any] = {"__name__": "program"}
    exec(compile(PROGRAM.format(lightning=lightning), f"{lightning}.py", "exec"), namespace)
    return namespace["main"](folder, **trainer)


def test_a_program_trains_the_same_model_with_its_import_lines_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "0")  # removed after the test, as Lightning leaves them behind
    theirs = run_program("lightning.pytorch", tmp_path / "theirs", devices=1)
    ours = run_program("phalanx.compat.lightning", tmp_path / "ours", devices=1)
    assert ours[0] == pytest.approx(theirs[0], abs=1e-6)
    assert ours[1] == [pytest.approx(each, abs=1e-6) for each in theirs[1]]
    torch.testing.assert_close(ours[2], theirs[2], rtol=0, atol=1e-6)


@pytest.mark.parametrize("module", MODULES)
def test_each_public_name_exists_or_its_import_says_what_to_use(module: str) -> None:
    theirs = importlib.import_module(f"lightning.pytorch{module}")
    ours = importlib.import_module(f"phalanx.compat.lightning{module}")
    sentences = []
    for name in getattr(theirs, "__all__", ["LightningModule", "LightningDataModule", "Trainer", "seed_everything"]):
        try:
            getattr(ours, name)
        except ImportError as error:
            sentences.append(str(error))
    assert all(sentence.startswith("phalanx.") for sentence in sentences)


def test_utilities_lack_only_helpers_for_authors_of_lightning() -> None:
    theirs = pytest.importorskip("lightning.pytorch.utilities")
    assert set(theirs.__all__) - set(compat.utilities.__all__) == UTILITIES_LEFT_OUT


@pytest.mark.parametrize("module", ["accelerators", "demos.mnist_datamodule", "loops", "plugins", "pytorch", "tuner"])
def test_a_module_without_a_counterpart_says_what_to_use(module: str) -> None:
    folder = module.partition(".")[0]
    with refuses(ImportError, folder):
        getattr(compat, folder)
    with refuses(ImportError, folder):
        importlib.import_module(f"phalanx.compat.lightning.{module}")


def test_the_package_has_its_folders_as_attributes() -> None:
    assert phalanx.callbacks.EarlyStopping is compat.callbacks.EarlyStopping
    assert phalanx.loggers.CSVLogger is compat.loggers.CSVLogger
    assert compat.LightningModule is phalanx.TrainModule


def test_modules_without_a_file_are_imported_by_their_table() -> None:
    for name, homes in aliases.MODULES.items():
        module = importlib.import_module(f"phalanx.compat.lightning.{name}")
        assert all(hasattr(module, each) for each in module.__all__), name
        assert homes
    with pytest.raises(ModuleNotFoundError, match=r"callbacks\.nothing"):
        importlib.import_module("phalanx.compat.lightning.callbacks.nothing")


def test_modules_of_utilities_are_attributes_without_an_import() -> None:
    done = run_script(
        "import phalanx.compat.lightning as pl\n"
        "print(pl.utilities.seed.isolate_rng.__name__, pl.utilities.types.STEP_OUTPUT is not None)\n"
        "print(pl.fabric.utilities.rank_zero.rank_zero_only is pl.utilities.rank_zero_only)\n"
        "print(hasattr(pl.utilities, 'nothing'))\n"
    )
    assert done.stdout.splitlines() == ["isolate_rng True", "True", "False"]


def test_another_name_of_an_object_is_reported() -> None:
    with refuses(ImportError, "LightningModule", "TrainModule"):
        from phalanx import LightningModule  # noqa: F401


def test_flops_of_a_linear_layer() -> None:
    layer, x = torch.nn.Linear(8, 4), torch.randn(3, 8)
    layer.weight.grad = torch.ones(4, 8)
    assert compat.utilities.measure_flops(layer, lambda: layer(x)) == 2 * 3 * 8 * 4
    both = compat.utilities.measure_flops(layer, lambda: layer(x), lambda out: out.sum())
    assert both == 2 * (2 * 3 * 8 * 4)
    assert torch.equal(layer.weight.grad, torch.ones(4, 8))


def test_generators_are_restored_after_isolation() -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    seed = importlib.import_module("phalanx.compat.lightning.utilities.seed")
    with seed.isolate_rng():
        torch.rand(7)
    assert torch.equal(torch.rand(3), expected)


def test_gradient_norms_of_a_module() -> None:
    layer = torch.nn.Linear(2, 1)
    layer.weight.grad, layer.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    norms = compat.utilities.grad_norm(layer, 2)
    assert {name: float(value) for name, value in norms.items()} == {
        "grad_2.0_norm/weight": 3.0,
        "grad_2.0_norm/bias": 4.0,
        "grad_2.0_norm_total": 5.0,
    }
    with refuses(ValueError, "norm_type=0"):
        compat.utilities.grad_norm(layer, 0)
