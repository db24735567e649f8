"""The JSON of commands follows the schemas that ``phalanx schema`` prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from called_command import Outcome
from made_runs import ended, write_run
from messages import refuses
from models import SILENT
from small_fits import Tiny, loader

from phalanx import Trainer
from phalanx.callbacks import ModelCheckpoint
from phalanx.cli.json_schemas import SCHEMAS, schema_of
from phalanx.cli.main import build_parser, main
from phalanx.framework.core.errors import UnknownNameError

MODULE = """
import torch
from phalanx import TrainModule

class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def evaluated(trainer, module):
    return {"parameters": len(list(module.parameters()))}
"""
READING = {
    "runs": ["."],
    "top": ["good", "--once"],
    "report": ["good"],
    "why": ["failed"],
    "data": ["real", "--step", "3"],
    "eval": ["real", "--function", "planned_model:evaluated"],
    "compare": ["good", "failed"],
    "plan": ["planned_model:Model"],
    "doctor": ["."],
    "checkpoint list": ["real"],
    "checkpoint inspect": ["real/checkpoints/last.ckpt"],
    "checkpoint verify": ["real/checkpoints/last.ckpt"],
    "checkpoint diff": ["real/checkpoints/last.ckpt", "real/checkpoints/last.ckpt"],
    "clean": [".", "--dry-run"],
}


def commands(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield all commands of a parser, those of groups included."""
    found = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in found:
        for below, one in action.choices.items():
            yield from commands(one, f"{name} {below}".strip())
    if not found:
        yield name, parser


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a made run that has finished, one that has failed, and a real one."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "good", report=ended(0))
    write_run(root / "failed", report=ended(1, "ValueError: planted"))
    saves = ModelCheckpoint(save_last=True)
    arguments: dict[str, Any] = {**SILENT, "logger": "csv", "enable_checkpointing": True, "callbacks": [saves]}
    trainer = Trainer(**{**arguments, "max_epochs": 1}, default_root_dir=root / "fits")
    trainer.fit(Tiny(), loader())
    assert trainer.run_dir is not None
    Path(trainer.run_dir).rename(root / "real")
    (root / "planned_model.py").write_text(MODULE)
    return root


def test_each_command_with_json_has_a_schema_and_no_other_one() -> None:
    with_json = {
        name
        for name, parser in commands(build_parser())
        if any("--json" in action.option_strings for action in parser._actions)
    }
    assert SCHEMAS.keys() == with_json
    for name in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema_of(name))


@pytest.mark.parametrize("name", READING)
def test_what_a_command_prints_follows_its_schema(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    done = called(capsys, *name.split(), "--json", *READING[name])
    assert done.out, done.err
    found = json.loads(done.out)
    jsonschema.validate(found, schema_of(name))
    if isinstance(found, dict):
        assert found["schema"] == 1


def called(capsys: pytest.CaptureFixture[str], *arguments: str) -> Outcome:
    code = main(arguments)
    shown = capsys.readouterr()
    return Outcome(code, shown.out, shown.err)


def test_a_schema_refuses_what_lacks_a_key() -> None:
    with pytest.raises(jsonschema.ValidationError, match="'runs' is a required property"):
        jsonschema.validate({"schema": 1, "count": 0}, schema_of("runs"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": 2, "count": 0, "runs": []}, schema_of("runs"))


def test_the_command_prints_a_schema_and_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(called(capsys, "schema", "checkpoint", "list").out) == schema_of("checkpoint list")
    assert called(capsys, "schema").out.splitlines() == [*SCHEMAS]
    with refuses(UnknownNameError, "Did you mean 'compare'"):
        schema_of("compere")
