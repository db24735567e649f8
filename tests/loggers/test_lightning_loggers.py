"""The public names and arguments of Lightning's loggers: each works, or its use says what to use instead."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from lightning_names import methods_that_lack_arguments, public, without_sentence
from messages import refuses

from phalanx import loggers
from phalanx.framework.core.errors import UnknownArgumentError

theirs = pytest.importorskip("lightning.pytorch.loggers")


@pytest.mark.parametrize("name", theirs.__all__)
def test_each_logger_exists_or_its_import_says_what_to_use(name: str) -> None:
    if name not in loggers.__all__:
        with refuses(ImportError, name, "docs/extending.md"):
            exec(f"from phalanx.loggers import {name}")
        return
    cls, own = getattr(theirs, name), getattr(loggers, name)
    assert methods_that_lack_arguments(cls, own) == {}
    assert without_sentence(public(cls), own) == {}


@pytest.mark.parametrize("name", ["CSVLogger", "TensorBoardLogger"])
def test_attributes_of_a_logger(name: str, tmp_path: Path) -> None:
    names = ["LOGGER_JOIN_CHAR", "group_separator", "root_dir", "log_dir", "save_dir", "name", "version"]
    if name == "TensorBoardLogger":
        names += ["NAME_HPARAMS_FILE", "sub_dir"]
    values: list[list[Any]] = []
    for package in (theirs, loggers):
        extra = {"sub_dir": "events"} if name == "TensorBoardLogger" else {}
        logger = getattr(package, name)(str(tmp_path), name="run", version=3, prefix="p", **extra)
        values.append([getattr(logger, each) for each in names])
    assert values[0] == values[1]


def test_a_misspelled_argument_of_the_library_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # W&B makes directories when it is imported.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pytest.importorskip("wandb")
    with refuses(UnknownArgumentError, "projct=", "'project'"):
        loggers.WandbLogger(save_dir=tmp_path, projct="mine")


def test_another_text_between_prefix_and_key(tmp_path: Path) -> None:
    class Slashed(loggers.CSVLogger):
        LOGGER_JOIN_CHAR = "/"

    logger = Slashed(tmp_path, name="run", version=0, prefix="p")
    logger.log_metrics({"loss": 1.0}, 0)
    logger.save()
    assert (tmp_path / "run" / "version_0" / "metrics.csv").read_text().split() == ["p/loss,step", "1.0,0"]
