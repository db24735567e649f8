"""Every public name of Lightning's classes exists, or its access says in one sentence what to use instead."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from models import Regressor, loader, silent_trainer
from torch import nn

from phalanx import Callback, DataModule, Trainer, TrainModule
from phalanx.framework.api.absent_names import DATA_MODULE, MODULE_METHODS, TRAINER
from phalanx.framework.core.errors import ConfigurationError

pl = pytest.importorskip("lightning.pytorch")

# Names of a LightningModule that a TrainModule lacks; torch says so itself.
MODULE_LACKS = {
    *("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME", "CHECKPOINT_HYPER_PARAMS_TYPE"),
    *("allow_zero_length_dataloader_with_multiple_devices", "configure_sharded_model", "device_mesh"),
    *("on_validation_model_zero_grad", "prepare_data_per_node", "remove_ignored_hparams"),
}


def public(cls: type, instance: object) -> set[str]:
    """Return the public names of a class and of one of its objects, without those of ``nn.Module``."""
    return {name for name in {*dir(cls), *vars(instance)} - {*dir(nn.Module)} if not name.startswith("_")}


def lightning_trainer() -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(accelerator="cpu", enable_model_summary=False, **quiet)


def missing(names: set[str], mine: object) -> dict[str, str]:
    """Return the names that an object lacks, with the messages of their errors."""
    found = {}
    for name in sorted(names):
        try:
            getattr(mine, name)
        except ConfigurationError:
            continue
        except AttributeError as error:
            found[name] = str(error)
    return found


def test_each_name_of_the_trainer() -> None:
    names = public(pl.Trainer, lightning_trainer())
    absent = missing(names, silent_trainer(devices=1))
    assert set(absent) == set(TRAINER)
    assert absent["fit_loop"].startswith("Trainer has no 'fit_loop': there are no loop objects: ")


def test_each_name_of_the_data_module() -> None:
    absent = missing(public(pl.LightningDataModule, pl.LightningDataModule()), DataModule())
    assert set(absent) == set(DATA_MODULE)
    assert absent["name"] == "DataModule has no 'name': read type(datamodule).__name__."


def test_each_name_of_the_module() -> None:
    assert set(missing(public(pl.LightningModule, pl.LightningModule()), TrainModule())) == MODULE_LACKS


@pytest.mark.parametrize("name", MODULE_METHODS)
def test_each_absent_method_of_the_module(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"TrainModule has no '{name}': .*torch"):
        getattr(TrainModule(), name)("model.file")


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
    for name in set(inspect.signature(pl.Trainer.__init__).parameters) - known:
        given: dict[str, Any] = {name: None}
        with pytest.raises(ConfigurationError, match=f"{name}=None\\): there is no such argument; leave it out"):
            Trainer(**given)


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
