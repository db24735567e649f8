"""The command ``phalanx checkpoint``: what it prints, its exit codes, and what it does without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from called_command import CalledCommand
from hostile import good
from made_runs import ended, write_run
from safetensors.torch import load_file

from phalanx import checkpoint
from phalanx.cli.checkpoint import moment

ROOT = Path(checkpoint.__file__).parent


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CalledCommand:
    return CalledCommand("checkpoint", capsys)


def damaged(path: Path) -> Path:
    file = good(path) / "model-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return path


def test_inspect(tmp_path: Path, run: Any) -> None:
    path = good(tmp_path / "a.ckpt")
    done = run("inspect", path)
    assert (done.code, done.err) == (0, "")
    for text in (
        "epoch 1",
        "step 3",
        "2 tensors (1 tied to others), 16 elements",
        "AdamW, 1 parameter: lr=0.1",
        "width=3",
    ):
        assert text in done.out
    told = json.loads(run("inspect", "--json", path).out)
    assert (told["step"], told["sections"]["model"]["elements"], told["finite"]) == (3, 16, True)
    assert told["files"] == {file.name: file.stat().st_size for file in path.glob("*.safetensors")}


def test_verify(tmp_path: Path, run: Any) -> None:
    path, bad = good(tmp_path / "a.ckpt"), damaged(tmp_path / "b.ckpt")
    done = run("verify", path)
    assert (done.code, done.err) == (0, "")
    assert "is good: 4 tensor files" in done.out
    done = run("verify", bad)
    assert (done.code, done.out) == (65, "")
    assert done.err.startswith("phalanx: tensor 'bias' in ")
    assert len(done.err.splitlines()) == 1
    done = run("verify", "--json", bad)
    told = json.loads(done.out)
    assert (done.code, told["good"]) == (65, False)
    assert told["problems"] == checkpoint.verify(bad)

    # Several at once.
    done = run("verify", path, bad)
    assert done.code == 65
    assert [line.split(":")[0] for line in done.out.splitlines()] == [f"{path} is good", f"{bad} is damaged"]
    told = json.loads(run("verify", "--json", path, bad).out)
    assert [one["good"] for one in told] == [True, False]


def test_the_directory_of_checkpoints_is_printed(tmp_path: Path, run: Any) -> None:
    place = tmp_path / "logs" / "version_0" / "checkpoints"
    place.mkdir(parents=True)
    good(place / "a.ckpt")
    for above in (tmp_path, tmp_path / "logs", tmp_path / "logs" / "version_0"):
        assert run("list", above).out == f"{above} holds no checkpoints. There are some in {place}.\n"
    assert "It is a directory of 1: `phalanx checkpoint list` shows them." in run("inspect", place).err


def test_a_run_is_listed_and_its_checkpoints_are_named(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "phalanx_logs/version_0", report=ended(0)) / "checkpoints"
    folder.mkdir()
    good(folder / "a.ckpt")
    monkeypatch.chdir(tmp_path)
    for name in ("0", "version_0", "phalanx_logs/version_0"):
        assert [line.split()[0] for line in run("list", name).out.splitlines()] == ["name", "a.ckpt"]
        expected = f"{name!r} is a run and not a checkpoint: its checkpoints are in phalanx_logs/version_0/checkpoints;"
        for arguments in (["inspect", name], ["verify", name], ["diff", name, name], ["consolidate", name, "out"]):
            done = run(*arguments)
            assert (done.code, len(done.err.splitlines())) == (65, 1)
            assert expected in done.err
    assert "checkpoint '1' does not exist." in run("inspect", "1").err
    assert "'1' does not exist; give" in run("list", "1").err


def test_list(tmp_path: Path, run: Any) -> None:
    good(tmp_path / "a.ckpt")
    damaged(tmp_path / "b.ckpt")
    done = run("list", tmp_path)
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == ["name", "a.ckpt", "b.ckpt"]
    assert done.out.splitlines()[1].split()[1:3] == ["3", "1"]
    done = run("list", tmp_path, "--verify")
    assert done.code == 65
    assert done.out.splitlines()[1].endswith("good")
    assert done.out.splitlines()[2].endswith("damaged")
    assert "b.ckpt: tensor 'bias'" in done.out.splitlines()[3]
    told = json.loads(run("list", tmp_path, "--json").out)
    assert [(Path(one["path"]).name, one["status"]) for one in told] == [("a.ckpt", "complete"), ("b.ckpt", "complete")]
    (tmp_path / "empty").mkdir()
    assert "holds no checkpoints" in run("list", tmp_path / "empty").out


def test_diff(tmp_path: Path, run: Any) -> None:
    path, other = good(tmp_path / "a.ckpt"), good(tmp_path / "b.ckpt", value=0.5)
    assert (run("diff", path, path).code, run("diff", path, path).out) == (0, "equal: 6 tensors, and everything else\n")
    done = run("diff", path, other)
    assert done.code == 65
    assert "  other values: weight: 12 of 12 elements, by up to 0.5" in done.out.splitlines()
    told = json.loads(run("diff", path, other, "--json").out)
    assert not told["equal"]
    assert told["sections"]["model"]["values"]["weight"]["different"] == 12


def test_consolidate(tmp_path: Path, run: Any) -> None:
    path, out = good(tmp_path / "a.ckpt"), tmp_path / "out.safetensors"
    done = run("consolidate", path, out, "--dtype", "bf16")
    assert (done.code, done.out) == (0, f"wrote {out}\n")
    assert torch.equal(load_file(out)["weight"], checkpoint.weights(path)["weight"].bfloat16())
    done = run("consolidate", path, tmp_path / "many", "--max-shard-size", "16B", "--section", "optimizer", "--json")
    assert json.loads(done.out) == {"schema": 1, "path": str(tmp_path / "many")}
    assert (tmp_path / "many" / "optimizer.safetensors.index.json").exists()
    assert run("consolidate", damaged(tmp_path / "b.ckpt"), tmp_path / "no").code == 65
    assert not (tmp_path / "no").exists()


def test_convert(tmp_path: Path, run: Any) -> None:
    weights = {"weight": torch.randn(3, 2)}
    foreign = {"state_dict": weights, "pytorch-lightning_version": "2.6.0", "epoch": 1, "global_step": 7, "loops": None}
    torch.save(foreign, tmp_path / "foreign.ckpt")
    done = run("convert", tmp_path / "foreign.ckpt", tmp_path / "out.ckpt", "--json")
    assert (done.code, json.loads(done.out)["path"]) == (0, str(tmp_path / "out.ckpt"))
    assert checkpoint.verify(tmp_path / "out.ckpt") == []
    assert torch.equal(checkpoint.weights(tmp_path / "out.ckpt")["weight"], weights["weight"])

    torch.save({**foreign, "hyper_parameters": {"loss": torch.nn.MSELoss()}}, tmp_path / "names.ckpt")
    assert run("convert", tmp_path / "names.ckpt", tmp_path / "named.ckpt").code == 65
    assert run("convert", tmp_path / "names.ckpt", tmp_path / "named.ckpt", "--trust").code == 0

    done = run("convert", tmp_path / "nothing", tmp_path / "other.ckpt")
    assert (done.code, done.out) == (65, "")
    for module in ("json:Nothing", "nowhere", "no.such.module:Class"):
        assert run("convert", tmp_path / "foreign.ckpt", tmp_path / "b.ckpt", "--module", module).code == 78


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["inspct", "x"], 78, "Did you mean 'inspect'"),
        (["inspect"], 78, "required: path"),
        (["inspect", "x", "--jsn"], 78, "Did you mean '--json'"),
        ([], 78, "required"),
        (["inspect", "nowhere"], 65, "does not exist"),
        (["consolidate", "a.ckpt", "out", "--dtype", "flaot16"], 78, "Did you mean 'float16'"),
        (["consolidate", "a.ckpt", "out", "--max-shard-size", "lots"], 78, "is not a size"),
        (["consolidate", "a.ckpt", "out", "--section", "optimiser"], 78, "Did you mean 'optimizer'"),
        (["consolidate", "a.ckpt", "taken"], 78, "exists"),
        (["consolidate", "a.ckpt", "taken/inside"], 74, "taken/inside' failed"),
    ],
)
def test_a_failure_is_one_sentence_and_a_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Any, arguments: list[str], code: int, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    good(tmp_path / "a.ckpt")
    (tmp_path / "taken").write_text("mine")
    done = run(*arguments)
    assert (done.code, done.out) == (code, "")
    assert text in done.err
    assert len(done.err.splitlines()) == 1


def test_the_command_is_installed_and_is_a_module() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\nphalanx = "phalanx.cli.main:main"\n' in project
    done = subprocess.run([sys.executable, "-m", "phalanx", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == "phalanx 0.1.0\n"


def test_a_reader_that_closes_the_pipe_is_not_an_error(tmp_path: Path) -> None:
    path = good(tmp_path / "a.ckpt")
    command = f"{sys.executable} -m phalanx checkpoint inspect --json {path} | head -c 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("{", "")


def test_moments_are_readable() -> None:
    assert moment(1_000_000_000) == "2001-09-09 01:46:40 UTC"
    assert moment(1e12) == "9999-12-31 23:59:59 UTC"
