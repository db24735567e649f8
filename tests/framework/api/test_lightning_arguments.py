"""Arguments and attributes of Lightning's modules, Trainer and Fabric, and what they do here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import nn

from phalanx import DataModule, Fabric, TrainModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.distributed.world import World
from phalanx.framework.trainer.data_sources import prepare_data

pl = pytest.importorskip("lightning.pytorch")
lightning_fabric = pytest.importorskip("lightning.fabric")


# ---- hyperparameters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [TrainModule, DataModule, pl.LightningModule])
def test_initial_and_removed_hyperparameters(base: Any) -> None:
    class Model(base):  # type: ignore[misc]
        def __init__(self, sizes: list[int], rate: float = 0.1) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.hparams.rate = 0.2
            self.hparams.sizes.append(3)

    model = Model([1, 2])
    assert dict(model.hparams) == {"sizes": [1, 2, 3], "rate": 0.2}
    assert dict(model.hparams_initial) == {"sizes": [1, 2], "rate": 0.1}
    model.remove_ignored_hparams(["rate", "other"])
    assert dict(model.hparams) == {"sizes": [1, 2, 3]}
    assert dict(model.hparams_initial) == {"sizes": [1, 2], "rate": 0.1}
    assert base().hparams_initial == {}


@pytest.mark.parametrize("logs", [True, False])
def test_hyperparameters_are_sent_to_the_loggers_unless_switched_off(logs: bool, tmp_path: Path) -> None:
    trainer = silent_trainer(
        devices=1, max_epochs=1, logger="csv", default_root_dir=tmp_path, enable_autolog_hparams=logs
    )
    trainer.fit(Regressor(), loader(8))
    assert trainer.enable_autolog_hparams is logs
    assert (Path(str(trainer.log_dir)) / "hparams.yaml").exists() is logs


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    trainer = silent_trainer(devices=1, max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(Regressor(lr=0.5), loader(8))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    return tmp_path / "saved.ckpt"


@pytest.mark.parametrize(
    ("name", "text", "lr", "optimizer"),
    [
        ("a.yaml", "lr: 0.25\noptimizer: sgd\n", 0.25, "sgd"),
        ("a.yml", "", 0.05, "adamw"),
        # A dict whose key is a list is valid syntax, and cannot be built: a value that is no literal stays a string.
        ("a.csv", "key,value\nlr,0.25\noptimizer,{[]: 1}\n", 0.25, "{[]: 1}"),
    ],
)
def test_a_file_with_hyperparameters(
    name: str, text: str, lr: float, optimizer: str, saved: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    module = Regressor.load_from_checkpoint(saved, hparams_file=tmp_path / name, dropout=0.5)
    assert dict(module.hparams) == {"lr": lr, "optimizer": optimizer, "dropout": 0.5}
    assert Regressor.load_from_checkpoint(saved).hparams["lr"] == 0.5


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("none.yaml", None, "does not exist; give a .yaml or .csv file"),
        ("a.json", "{}", "must be a .yaml, .yml or .csv file"),
        ("a.yaml", "- 1\n- 2\n", "holds a list, but must hold a mapping"),
        ("a.yaml", "!!python/object/apply:os.getpid []", "cannot be read: could not determine a"),
        ("a.yaml", "0", "holds an int, but must hold a mapping"),
        ("a.csv", "name,value\nlr,1\n", "must name the columns key and value, and names name, value"),
        ("a.csv", "", "must name the columns key and value, and names none"),
    ],
)
def test_a_file_without_hyperparameters(
    name: str, text: str | None, sentence: str, saved: Path, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with refuses(ConfigurationError, "hparams_file=", sentence):
        Regressor.load_from_checkpoint(saved, hparams_file=tmp_path / name)


# ---- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "weights_only"),
    [
        ({"cuda:0": "cpu", "cuda:1": torch.device("cpu")}, None),
        (lambda storage, location: storage, True),
        (lambda storage, location: None, False),
    ],
)
def test_locations_as_torch_load_takes_them(location: Any, weights_only: bool | None, saved: Path) -> None:
    module = Regressor.load_from_checkpoint(saved, map_location=location, weights_only=weights_only)
    assert module.device == torch.device("cpu")
    assert torch.equal(weights_of(module), weights_of(Regressor.load_from_checkpoint(saved)))


def test_locations_on_several_devices_are_refused(saved: Path) -> None:
    with refuses(ConfigurationError, "map_location=", "'cuda:0'"):
        Regressor.load_from_checkpoint(saved, map_location={"cuda:0": "cpu", "cuda:1": "cuda:0"})
    with refuses(ConfigurationError, "'cpu'", "'cuda'"):
        Regressor.load_from_checkpoint(saved, map_location=lambda storage, location: torch.empty(0, device="meta"))


class Evaluated(Regressor):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self(batch[0])


@pytest.mark.parametrize("weights_only", [True, False])
def test_the_stages_accept_weights_only(weights_only: Any, saved: Path) -> None:
    trainer, module = silent_trainer(devices=1, max_epochs=2), Evaluated(lr=0.5)
    trainer.fit(module, loader(8), ckpt_path=saved, weights_only=weights_only)
    assert trainer.global_step == 4  # with the optimizer and the position of the checkpoint
    for stage in (trainer.validate, trainer.test, trainer.predict):
        assert stage(module, loader(8), ckpt_path=saved, weights_only=weights_only)
    wrong: Any = "yes"
    with refuses(ConfigurationError, "weights_only='yes'"):
        trainer.fit(module, loader(8), weights_only=wrong)


def test_options_of_other_storages_are_refused(tmp_path: Path) -> None:
    trainer = silent_trainer(devices=1, max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(Regressor(), loader(8))
    trainer.save_checkpoint(tmp_path / "a.ckpt", storage_options=None)
    options: Any = {"key": 1}
    with refuses(ConfigurationError, "save_checkpoint", "storage_options="):
        trainer.save_checkpoint(tmp_path / "b.ckpt", storage_options=options)
    assert not (tmp_path / "b.ckpt").exists()


# ---- Fabric ---------------------------------------------------------------------------------------------------------


def test_a_scheduler_set_up_with_its_optimizer() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    ready, own_optimizer, own_scheduler = fabric.setup(module, optimizer, scheduler=scheduler)
    fabric.backward(ready(torch.ones(1, 2)).sum())
    own_optimizer.step()
    own_scheduler.step()
    own_scheduler.step()
    assert own_scheduler.get_last_lr() == [0.25]


@pytest.mark.parametrize("precision", ["64-true", "16-true", "bf16-mixed"])
def test_tensors_of_the_precision(precision: Any) -> None:
    dtypes = []
    for kind in (lightning_fabric.Fabric, Fabric):
        with kind(accelerator="cpu", devices=1, precision=precision).init_tensor():
            dtypes.append(torch.zeros(1).dtype)
    assert dtypes[0] == dtypes[1]
    assert torch.zeros(1).dtype == torch.float32


def test_arguments_of_fabric_without_a_counterpart(saved: Path) -> None:
    fabric, given = Fabric(accelerator="cpu", devices=1), nn.Linear(1, 1)
    other: Any = given
    for call, name in (
        (lambda: Fabric(accelerator="cpu", devices=1, plugins=other), "plugins="),
        (lambda: fabric.all_gather(1, group=other), "group="),
        (lambda: fabric.all_reduce(1, group=other), "group="),
    ):
        with refuses(ConfigurationError, name):
            call()
    contents = fabric.load(saved, weights_only=False)
    assert contents.keys() == fabric.load(saved).keys()
    assert fabric.load_raw(saved, weights_only=False).keys() == fabric.load_raw(saved).keys()


# ---- data -----------------------------------------------------------------------------------------------------------


class Prepared(DataModule):
    def __init__(self, folder: Path, per_node: bool) -> None:
        super().__init__()
        self.folder, self.prepare_data_per_node = folder, per_node

    def prepare_data(self) -> None:
        (self.folder / str(World.from_environment("cpu").rank)).touch()


def prepare_on_two_nodes(folder: str, per_node: bool) -> None:
    """Prepare data as if each rank were the only one of its node."""
    world = World.from_environment("cpu")
    world.local_rank = 0
    prepare_data(Prepared(Path(folder), per_node), world)
    # A rank that does not prepare the data waits until they exist.
    assert (Path(folder) / "0").exists()


@pytest.mark.parametrize("per_node", [True, False])
def test_data_prepared_on_each_node_or_once(per_node: bool, tmp_path: Path) -> None:
    run_on_ranks(2, prepare_on_two_nodes, str(tmp_path), per_node)
    assert sorted(path.name for path in tmp_path.iterdir()) == (["0", "1"] if per_node else ["0"])
