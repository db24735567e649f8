"""Every public name of Lightning's classes exists, or its access says in one sentence what to use instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from lightning_names import methods_that_lack_arguments, missing, public, without_sentence
from messages import refuses
from models import Regressor, loader, silent_trainer

import phalanx
from phalanx import Callback, DataModule, Fabric, Trainer, TrainModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.core.foreign_names import CHECKPOINT_KEYS, MEMBERS

pl = pytest.importorskip("lightning.pytorch")
lightning_fabric = pytest.importorskip("lightning.fabric")


def lightning_trainer() -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", enable_model_summary=False, **quiet)


def test_each_name_of_the_trainer() -> None:
    names = public(pl.Trainer, lightning_trainer())
    absent = missing(names, silent_trainer(devices=1))
    assert set(absent) == set(MEMBERS["Trainer"])
    assert absent["fit_loop"].startswith("Trainer has no 'fit_loop': there are no loop objects: ")


@pytest.mark.parametrize("name", MEMBERS["Strategy"])
def test_each_absent_name_of_a_strategy(name: str) -> None:
    with refuses(AttributeError, f"'{name}'"):
        getattr(silent_trainer(devices=1).strategy, name)


def test_the_optimizer_of_a_hook_has_the_original() -> None:
    class Model(Regressor):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
            assert optimizer.optimizer is self.optimizers()
            assert isinstance(optimizer, type(self.optimizers()))
            optimizer.step(closure=optimizer_closure)

    module = Model()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    silent_trainer(devices=1, max_steps=1).fit(module, loader(8))
    assert all(not old.equal(new) for old, new in zip(before, module.parameters(), strict=True))


def test_a_misspelled_import_names_the_closest_name() -> None:
    with refuses(ImportError, "ModelCheckpont", "'ModelCheckpoint'"):
        from phalanx.callbacks import ModelCheckpont  # noqa: F401
    with refuses(AttributeError, "'Trainr'", "'Trainer'"):
        phalanx.Trainr  # noqa: B018
    assert not hasattr(phalanx, "Trainr")


def test_each_name_of_the_data_module() -> None:
    absent = missing(public(pl.LightningDataModule, pl.LightningDataModule()), DataModule())
    assert set(absent) == set(MEMBERS["DataModule"])
    assert absent["name"] == "DataModule has no 'name': read type(datamodule).__name__."


def test_each_name_of_the_module() -> None:
    module = TrainModule()
    assert missing(public(pl.LightningModule, pl.LightningModule()), module) == {}
    assert methods_that_lack_arguments(pl.LightningModule, TrainModule) == {}
    assert module.device_mesh is None
    assert module.allow_zero_length_dataloader_with_multiple_devices


@pytest.mark.parametrize("name", [name for name in MEMBERS["TrainModule"] if name.islower()])
def test_each_absent_method_of_the_module(name: str) -> None:
    with refuses(ConfigurationError, f"'{name}'"):
        getattr(TrainModule(), name)("model.file")


@pytest.mark.parametrize("name", CHECKPOINT_KEYS)
def test_each_absent_key_of_checkpoints(name: str) -> None:
    for owner in (TrainModule(), TrainModule):
        key = getattr(owner, name)
        for use in (hash, str, lambda key: key == "hyper_parameters"):
            with refuses(ConfigurationError, f"'{name}'"):
                use(key)


def test_each_name_of_fabric() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    theirs = lightning_fabric.Fabric
    assert without_sentence(public(theirs), fabric) == {}
    assert missing(["run"], fabric) == {
        "run": "Fabric has no 'run': put the code into a function and call fabric.launch(function)."
    }
    assert methods_that_lack_arguments(theirs, Fabric) == {}


def test_each_argument_of_the_stages() -> None:
    assert methods_that_lack_arguments(pl.Trainer, Trainer) == {}


def test_each_hook_of_a_callback_with_its_arguments() -> None:
    names = public(pl.Callback, pl.Callback())
    assert missing(names, Callback()) == {}
    for name in names:
        theirs = inspect.getattr_static(pl.Callback, name)
        if inspect.isfunction(theirs) and name not in ("load_state_dict", "state_dict"):
            arguments = list(inspect.signature(theirs).parameters)
            # Hooks receive these two by position.
            renamed = [{"pl_module": "module"}.get(argument, argument) for argument in arguments]
            assert list(inspect.signature(getattr(Callback, name)).parameters) == renamed, name


def test_each_argument_of_the_trainer() -> None:
    known = set(inspect.signature(Trainer.__init__).parameters)
    assert set(inspect.signature(pl.Trainer.__init__).parameters) <= known
    registry: dict[str, Any] = {"model_registry": "a/b"}
    with refuses(ConfigurationError, "model_registry"):
        Trainer(**registry)


def test_values_of_the_further_names() -> None:
    trainer = silent_trainer(devices=1, max_epochs=1, accumulate_grad_batches=2, reload_dataloaders_every_n_epochs=3)
    assert (trainer.accumulate_grad_batches, trainer.reload_dataloaders_every_n_epochs) == (2, 3)
    assert (trainer.device_ids, trainer.barebones, trainer.scaler) == ([0], False, None)
    assert (trainer.received_sigterm, trainer.enable_validation, trainer.progress_bar_callback) == (False, False, None)
    module = Regressor()
    trainer.fit(module, loader(8))
    assert not module.on_gpu
    shown = Trainer(accelerator="cpu", devices=1, enable_progress_bar=True, logger=False)
    assert type(shown.progress_bar_callback).__name__.endswith("ProgressBar")


def test_a_subclass_may_define_an_absent_name() -> None:
    class Named(DataModule):
        name = "mine"

    assert Named().name == "mine"
    assert not hasattr(DataModule(), "name")
