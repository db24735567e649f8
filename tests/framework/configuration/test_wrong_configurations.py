"""Wrong configurations: each is refused with one sentence, and the closest name if there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configured import Net, Points
from messages import refuses

from phalanx import TrainerCLI
from phalanx.configuration import TrainerArgumentParser
from phalanx.errors import ConfigurationError

CLASSES: dict[str, Any] = {"model_class": Net, "datamodule_class": Points}
SUBCLASSES: dict[str, Any] = {**CLASSES, "subclass_mode_model": True}

OPTIONS = {
    ("--trainer.max_epoch", "3"): "'--trainer.max_epoch' is not known. Did you mean '--trainer.max_epochs'?",
    ("--trainer.num_train_epochs", "3"): "'--trainer.num_train_epochs' is not known. "
    "Did you mean '--trainer.max_epochs'?",
    ("--trainer.max_epochs", "many"): "trainer.max_epochs=many must be of type int or null.",
    ("--max_epochs", "3"): "'--max_epochs' is not known. Did you mean '--trainer.max_epochs'?",
    ("--model.widht=3",): "'--model.widht' is not known. Did you mean '--model.width'? Known: width, lr.",
    ("--model.width=wide",): "model.width=wide must be of type int.",
    ("--modle.width=3",): "'--modle.width' is not known. Did you mean '--model'?",
    ("--trainer.ckpt_path=last",): "'--trainer.ckpt_path' is not known; it is not an argument of the Trainer: "
    "write it beside 'trainer'.",
    ("--trainer.callbacks=EarlyStoping",): "trainer.callbacks='EarlyStoping' is not known. "
    "Did you mean 'early_stopping'?",
    ("--trainer.callbacks+=tymer",): "trainer.callbacks='tymer' is not known. Did you mean 'timer'?",
    ("--trainer.callbacks", "[early_stopping"): "trainer.callbacks='[early_stopping' is not known. "
    "Did you mean 'early_stopping'?",
    ("--trainer.callbacks={class_path: timer",): "trainer.callbacks='{class_path: timer' is not known. ",
    ("--trainer.max_epochs=[3",): "trainer.max_epochs=[3 must be of type int or null.",
    ("--trainer.logger=cvs",): "trainer.logger='cvs' is not known. Did you mean 'csv'?",
    ("--trainer.strategy=dpp",): "strategy='dpp' is not known. Did you mean 'ddp'?",
    ("--optimizer=AdamWW",): "optimizer='AdamWW' is not known. Did you mean 'AdamW'?",
    ("--optimizer=SGD", "--optimizer.leraning_rate=1"): "optimizer.leraning_rate is not an argument of "
    "torch.optim.SGD. Known: ",
    ("-c", "/nowhere.yaml"): "the configuration '/nowhere.yaml' does not exist.",
}
FILES = {
    "trainer:\n  max_epoch: 3\n": "'trainer.max_epoch' is not known. Did you mean 'trainer.max_epochs'?",
    "trainr:\n  max_epochs: 3\n": "'trainr.max_epochs' is not known. Did you mean 'trainer'?",
    "trainer:\n  seed: 3\n": "'trainer.seed' is not known; it is 'seed_everything', beside 'trainer'.",
    "trainer: [\n": "the configuration is not YAML in line 2, column 1: ",
    "fit\n": "a configuration must consist of sections, such as 'model:' and 'trainer:'.",
    "model:\n  class_path: configured.Nett\n": "model: configured has no 'Nett'. Did you mean 'Net'?",
    "model:\n  class_path: no_module.Net\n": "model: class_path 'no_module.Net' cannot be imported: "
    "No module named 'no_module'.",
    "model:\n  class_path: configured.Points\n": "model: configured.Points does not derive from Net.",
    "model:\n  class_path: configured.Net\n  init_args: {widht: 3}\n": "model.widht is not an argument of "
    "configured.Net. Did you mean 'width'?",
    "model:\n  class_path: configured.Net\n  init_args: {width: wide}\n": "model.width=wide must be of type int.",
    "model:\n  class_path: configured.ScaledNet\n": "'scale' of configured.ScaledNet must be given: ",
    "trainer:\n  callbacks:\n  - class_path: lightning.pytorch.callbacks.ModelPruning\n": "class_path "
    "'lightning.pytorch.callbacks.ModelPruning' has no counterpart: ",
    "trainer:\n  callbacks:\n  - class_path: lightning.pytorch.callbacks.NoSuchThing\n": "class_path "
    "'lightning.pytorch.callbacks.NoSuchThing' has no counterpart in phalanx: leave it out, or write the class.",
    "trainer:\n  callbacks:\n  - class_path: EarlyStopping\n": "'monitor' of phalanx.callbacks.EarlyStopping "
    "must be given: ",
}


def sentence(*arguments: str, **options: Any) -> str:
    """Return the error for the arguments of a fit, which is one sentence or two."""
    with pytest.raises(ConfigurationError) as refused:
        TrainerCLI(args=["fit", "--trainer.logger=false", *arguments], **options)
    text = str(refused.value)
    assert len(text.splitlines()) == 1
    assert len(text) < 280
    assert refused.value.exit_code == 78
    return text


@pytest.mark.parametrize(("arguments", "expected"), OPTIONS.items(), ids=map(" ".join, OPTIONS))
def test_a_wrong_option(arguments: tuple[str, ...], expected: str) -> None:
    assert sentence(*arguments, **CLASSES).startswith(expected)


@pytest.mark.parametrize(("text", "expected"), FILES.items(), ids=map(repr, FILES))
def test_a_wrong_file(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    assert sentence("-c", str(path), **SUBCLASSES).startswith(expected)


def test_a_wrong_stage_and_none() -> None:
    for given, expected in (
        (["fitt"], "'fitt' is not a command. Did you mean 'fit'? Known: "),
        ([], "a command must be"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            TrainerCLI(Net, Points, args=given)
        assert str(refused.value).startswith(expected)


def test_a_section_that_is_required() -> None:
    assert sentence(model_class=None, datamodule_class=Points).startswith("'model' must be given: ")


def test_a_class_that_cannot_have_a_section() -> None:
    with refuses(ConfigurationError, "'extra'", "TrainModule", "DataModule"):
        TrainerArgumentParser().add_component_args(dict, "extra")


class Failing(Net):
    """A module that cannot be created."""

    def __init__(self) -> None:
        raise ValueError("planted")


@pytest.mark.parametrize("options", [{"model_class": Failing}, {"model_class": Net, "subclass_mode_model": True}])
def test_an_error_of_a_class_is_its_own_and_lacks_frames_of_the_parser(options: dict[str, Any]) -> None:
    given = [f"--model={__name__}.Failing"] if "subclass_mode_model" in options else []
    with pytest.raises(ValueError, match="planted") as failed:
        TrainerCLI(datamodule_class=Points, args=given, run=False, **options)
    assert str(failed.value) == "planted"
    files = [str(entry.path) for entry in failed.traceback]
    assert files[-1] == __file__
    assert not any("jsonargparse" in file for file in files)
    assert failed.value.__context__ is None
