"""``phalanx export``, run as a user runs it: weights and programs against the module that was trained."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_terminal import command, warm_command
from ranks import run_command, run_script
from safetensors.torch import load_file

import phalanx
from phalanx.framework.resume.export_program import _program

MODEL = """
import torch
from torch import nn
from phalanx import TrainModule

class Model(TrainModule):
    def __init__(self, width, form="tuple"):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(), nn.Linear(width, 2))
        x = torch.ones(3, 4)
        self.example_input_array = {"tensor": x, "tuple": (x, x), "dict": {"x": x, "y": x}}.get(form)
    def forward(self, x, y=None):
        return self.net(x if y is None else x + y)
    def training_step(self, batch, index):
        loss = self(batch[0]).square().mean()
        self.log("train/loss", loss)
        return loss
    def validation_step(self, batch, index):
        # The first checkpoint is the best one.
        self.log("val/loss", float(self.global_step))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class NoModel:
    pass
"""
SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
from phalanx import Trainer
from phalanx.callbacks import EMAWeightAveraging, ModelCheckpoint

sys.path.insert(0, sys.argv[1])
from model import Model

if __name__ == "__main__":
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(32, 4)), 8)
    Trainer(
        max_epochs=2, accelerator="cpu", default_root_dir=sys.argv[1], logger="csv", enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EMAWeightAveraging(decay=0.5), ModelCheckpoint(monitor="val/loss", save_top_k=-1)],
    ).fit(Model(6, sys.argv[2]), data, data)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run of two checkpoints, the first of which is the best, and its module."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "model.py").write_text(MODEL)
    done = run_script(SCRIPT, str(folder), "tuple")
    assert done.returncode == 0, done.stdout
    return folder


def checkpoints(folder: Path) -> tuple[Path, Path]:
    first, second = (
        each.path for each in phalanx.checkpoint.checkpoints(folder / "phalanx_logs/version_0/checkpoints")
    )
    return first, second


def export(folder: Path, *arguments: Any) -> subprocess.CompletedProcess[str]:
    # A module is imported, and would stay.
    run = warm_command if "--module" in arguments else command
    return run("export", *arguments, cwd=folder)


def test_the_best_weights_of_a_run(folder: Path) -> None:
    done = export(folder, "0", "best.safetensors", "--json")
    best, last = checkpoints(folder)
    assert json.loads(done.stdout) == {"schema": 1, "checkpoint": str(best), "path": "best.safetensors"}
    done = export(folder, "0", "again.safetensors")
    wrote, note = done.stdout.splitlines()
    assert wrote == f"wrote again.safetensors from {best.relative_to(folder)}"
    # The score of the best checkpoint is that of the average.
    assert "--average ema" in note
    written, expected = load_file(folder / "best.safetensors"), phalanx.checkpoint.weights(best)
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(written[name], tensor) for name, tensor in phalanx.checkpoint.weights(last).items())


def test_an_average_in_another_dtype_in_shards(folder: Path) -> None:
    _, last = checkpoints(folder)
    done = export(folder, last, "shards", "--dtype", "bf16", "--max-shard-size", "60B", "--average", "ema")
    assert done.returncode == 0, done.stdout
    files = sorted((folder / "shards").glob("*.safetensors"))
    assert len(files) > 1
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    averaged = phalanx.checkpoint.load(last)["averages_tensors"]
    assert torch.equal(written["net.0.weight"], averaged["ema/net.0.weight"].bfloat16())


USE = """
import sys
import torch
program = torch.export.load("model.pt2").module()
inputs = torch.load("inputs.pt")
torch.save(program(**inputs) if isinstance(inputs, dict) else program(*inputs), "outputs.pt")
assert "phalanx" not in sys.modules
"""


def test_a_program_computes_what_the_module_computes(folder: Path) -> None:
    done = export(folder, "0", "model.pt2", "--module", "model:Model", "--average", "ema")
    assert done.returncode == 0, done.stdout
    best, _ = checkpoints(folder)
    source: dict[str, Any] = {}
    exec(MODEL, source)
    module = source["Model"].load_from_checkpoint(best, average="ema").eval()
    # Another batch size than that of the example.
    inputs = torch.randn(5, 4), torch.randn(5, 4)
    torch.save(inputs, folder / "inputs.pt")
    used = run_command([sys.executable, "-c", USE], folder)
    assert used.returncode == 0, used.stdout
    expected = module.net(inputs[0] + inputs[1])
    torch.testing.assert_close(torch.load(folder / "outputs.pt"), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("form", "inputs"), [("tensor", (torch.randn(5, 4),)), ("dict", {"y": torch.randn(5, 4), "x": torch.randn(5, 4)})]
)
def test_forms_of_the_example(form: str, inputs: Any) -> None:
    source: dict[str, Any] = {}
    exec(MODEL, source)
    module = source["Model"](6, form).eval()
    program: Any = _program(module, module.example_input_array).module()
    given = list(inputs.values()) if isinstance(inputs, dict) else inputs
    output = program(**inputs) if isinstance(inputs, dict) else program(*inputs)
    torch.testing.assert_close(output, module.net(sum(given)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ("0 m.safetensor", 78, "must end in .safetensors for weights, or in .pt2 for a program. Did you mean '.safe"),
        ("version_1 m.safetensors", 78, "There is no run 'version_1'. Did you mean 'version_0'?"),
        ("0 m.pt2", 78, "give --module package.module:Class."),
        ("0 m.safetensors --module model:Model", 78, "--module is for .pt2 files"),
        ("0 m.pt2 --module model:Model --dtype bf16", 78, "are for .safetensors files"),
        ("0 m.pt2 --module model:Modle", 78, "Did you mean 'Model'?"),
        ("0 m.pt2 --module model:NoModel", 78, "is not a subclass of TrainModule"),
        ("0 model.py", 78, "must end in"),
    ],
)
def test_wrong_arguments_get_one_sentence(arguments: str, code: int, sentence: str, folder: Path) -> None:
    done = export(folder, *arguments.split())
    assert sentence in done.stdout
    assert (done.returncode, len(done.stdout.splitlines())) == (code, 1), done.stdout
    assert not list(folder.glob("m.*"))


def test_an_existing_file_is_not_replaced(folder: Path) -> None:
    for name, options in (("kept.safetensors", []), ("kept.pt2", ["--module", "model:Model"])):
        (folder / name).write_text("mine")
        done = export(folder, "0", name, *options)
        assert done.returncode == 78
        assert f"phalanx: {name!r} exists; choose another name" in done.stdout
        assert (folder / name).read_text() == "mine"


def test_what_cannot_be_exported_gets_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    assert run_script(SCRIPT, str(tmp_path), "none").returncode == 0
    done = export(tmp_path, "0", "m.pt2", "--module", "model:Model")
    assert "Model has no example_input_array: set it in __init__" in done.stdout
    for path in checkpoints(tmp_path):
        phalanx.checkpoint.remove(path)
    done = export(tmp_path, "0", "m.safetensors")
    assert (done.returncode, "has no complete checkpoint to export" in done.stdout) == (65, True)
