"""Wrong configurations: each is refused with one sentence, and the closest name if there is one."""

from __future__ import annotations

from collections.abc import Sequence
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
    ("--trainer.max_epoch", "3"): ("'--trainer.max_epoch'", "'--trainer.max_epochs'"),
    ("--trainer.num_train_epochs", "3"): ("'--trainer.num_train_epochs'", "'--trainer.max_epochs'"),
    ("--trainer.max_epochs", "many"): ("max_epochs='many'",),
    ("--max_epochs", "3"): ("'--max_epochs'", "'--trainer.max_epochs'"),
    ("--model.widht=3",): ("'--model.widht'", "'--model.width'"),
    ("--model.width=wide",): ("model.width=wide",),
    ("--modle.width=3",): ("'--modle.width'", "'--model'"),
    ("--trainer.ckpt_path=last",): ("'--trainer.ckpt_path'", "'trainer'"),
    ("--trainer.callbacks=EarlyStoping",): ("trainer.callbacks='EarlyStoping'", "'early_stopping'"),
    ("--trainer.callbacks+=tymer",): ("trainer.callbacks='tymer'", "'timer'"),
    ("--trainer.callbacks", "[early_stopping"): ("trainer.callbacks='[early_stopping'", "'early_stopping'"),
    ("--trainer.callbacks={class_path: timer",): ("trainer.callbacks='{class_path: timer'",),
    ("--trainer.max_epochs=[3",): ("max_epochs='[3'",),
    ("--trainer.logger=cvs",): ("trainer.logger='cvs'", "'csv'"),
    ("--trainer.strategy=dpp",): ("strategy='dpp'", "'ddp'"),
    ("--optimizer=AdamWW",): ("optimizer='AdamWW'", "'AdamW'"),
    ("--optimizer=SGD", "--optimizer.leraning_rate=1"): ("optimizer.leraning_rate", "torch.optim.SGD"),
    ("-c", "/nowhere.yaml"): ("'/nowhere.yaml'",),
}
FILES = {
    "trainer:\n  max_epoch: 3\n": ("'trainer.max_epoch'", "'trainer.max_epochs'"),
    "trainr:\n  max_epochs: 3\n": ("'trainr.max_epochs'", "'trainer'"),
    "trainer:\n  seed: 3\n": ("'trainer.seed'", "'seed_everything'"),
    "trainer: [\n": ("line 2, column 1",),
    "fit\n": ("sections",),
    "model:\n  class_path: configured.Nett\n": ("'Nett'", "'Net'"),
    "model:\n  class_path: no_module.Net\n": ("'no_module.Net'", "'no_module'"),
    "model:\n  class_path: configured.Points\n": ("configured.Points",),
    "model:\n  class_path: configured.Net\n  init_args: {widht: 3}\n": ("model.widht", "'width'"),
    "model:\n  class_path: configured.Net\n  init_args: {width: wide}\n": ("model.width=wide",),
    "model:\n  class_path: configured.ScaledNet\n": ("'scale'", "configured.ScaledNet"),
    "trainer:\n  callbacks:\n  - class_path: lightning.pytorch.callbacks.ModelPruning\n": ("callbacks.ModelPruning'",),
    "trainer:\n  callbacks:\n  - class_path: lightning.pytorch.callbacks.NoSuchThing\n": ("callbacks.NoSuchThing'",),
    "trainer:\n  callbacks:\n  - class_path: EarlyStopping\n": ("'monitor'", "phalanx.callbacks.EarlyStopping"),
}


def check(names: Sequence[str], *arguments: str, **options: Any) -> None:
    """See that the error for the arguments of a fit is one sentence or two, and contains the names."""
    with refuses(ConfigurationError, *names) as refused:
        TrainerCLI(args=["fit", "--trainer.logger=false", *arguments], **options)
    text = str(refused.value)
    assert len(text.splitlines()) == 1
    assert len(text) < 280
    assert refused.value.exit_code == 78


@pytest.mark.parametrize(("arguments", "names"), OPTIONS.items(), ids=map(" ".join, OPTIONS))
def test_a_wrong_option(arguments: tuple[str, ...], names: tuple[str, ...]) -> None:
    check(names, *arguments, **CLASSES)


@pytest.mark.parametrize(("text", "names"), FILES.items(), ids=map(repr, FILES))
def test_a_wrong_file(text: str, names: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    check(names, "-c", str(path), **SUBCLASSES)


def test_a_wrong_stage_and_none() -> None:
    with refuses(ConfigurationError, "'fitt'", "'fit'"):
        TrainerCLI(Net, Points, args=["fitt"])
    with refuses(ConfigurationError, "command"):
        TrainerCLI(Net, Points, args=[])


def test_a_section_that_is_required() -> None:
    check(["'model'"], model_class=None, datamodule_class=Points)


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
