"""``phalanx new``: projects that train at once and whose tests pass, and folders that it does not touch."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_terminal import Terminal, command, shown_lines
from ranks import run_script

from phalanx.cli import new_project
from phalanx.cli.commands import KINDS
from phalanx.framework.trainer.settings import TrainerSettings

# Most of the time of a small training is that of these imports.
_LIBRARIES = ("pytest", "sklearn.datasets", "sklearn.decomposition")
_RUN_TESTS = "import sys, pytest\nsys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]))"


def created(kind: str, root: Path) -> Path:
    """Return the folder of a new project."""
    done = command("new", kind, f"my-{kind}", cwd=root)
    assert done.returncode == 0, done.stdout
    return root / f"my-{kind}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_project_is_short_and_its_own_test_passes(kind: str, tmp_path: Path) -> None:
    folder = created(kind, tmp_path)
    expected = {"train.py", "test_train.py"} | ({"config.yaml"} if kind != "loop" else set())
    assert {file.name for file in folder.iterdir()} == expected
    assert len((folder / "train.py").read_text().splitlines()) <= 40
    done = run_script(_RUN_TESTS, str(folder), libraries=_LIBRARIES)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True), done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_project_trains_at_once(kind: str, tmp_path: Path) -> None:
    script = created(kind, tmp_path) / "train.py"
    # Two epochs or steps, and not as many as learn something.
    text, count = re.subn(r"(max_epochs=|max_steps=|epochs: int = )\d+", r"\g<1>2", script.read_text())
    assert count == 1
    script.write_text(text.replace("log_every", f"default_root_dir={str(tmp_path)!r}, log_every"))
    done = run_script(script, libraries=_LIBRARIES)
    assert done.returncode == 0, done.stdout
    if kind == "loop":
        assert re.search(r"accuracy on unseen images: \d+\.\d%, saved as digits.ckpt", done.stdout)
    else:
        assert len(list(tmp_path.glob("phalanx_logs/version_0/report.html"))) == 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "loop"])
def test_the_configuration_names_what_the_script_has(kind: str, tmp_path: Path) -> None:
    folder = created(kind, tmp_path)
    config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text())
    script = (folder / "train.py").read_text()
    assert config["trainer"].keys() <= {each.name for each in fields(TrainerSettings)}
    for section in ("model", "data"):
        name = config[section]["class_path"].removeprefix("train.")
        assert f"class {name}(" in script
        for argument, value in config[section].get("init_args", {}).items():
            assert re.search(rf"\b{argument}: int = {value}\b", script)
    length = next(name for name in ("max_epochs", "max_steps") if name in config["trainer"])
    assert f"{length}={config['trainer'][length]}" in script


def test_the_next_commands_are_shown_in_a_terminal_and_as_json(tmp_path: Path) -> None:
    lines = shown_lines(Terminal(["new", "lm", "here/gpt_2"], tmp_path).end())
    assert lines[0] == "created here/gpt_2: config.yaml, test_train.py, train.py"
    next_commands = ["cd here/gpt_2", "python train.py", "phalanx fit config.yaml", "pytest"]
    assert [line.split("    ")[0].strip() for line in lines[1:]] == next_commands
    found = json.loads(command("new", "loop", "mine", "--json", cwd=tmp_path).stdout)
    assert (found["schema"], found["path"], found["files"]) == (1, "mine", ["test_train.py", "train.py"])


JSONARGPARSE = "'jsonargparse[signatures]>=4.49'"


@pytest.mark.parametrize(
    ("kind", "files", "absent", "command"),
    [
        (
            "classifier",
            ["train.py", "config.yaml"],
            {"sklearn", "jsonargparse"},
            f"scikit-learn {JSONARGPARSE}",
        ),
        ("classifier", ["train.py"], {"pytest", "jsonargparse"}, None),
        ("lm", ["train.py", "test_train.py", "config.yaml"], {"sklearn", "pytest"}, "pytest"),
        ("loop", ["train.py", "test_train.py"], set(), None),
    ],
)
def test_what_a_project_needs_is_named_if_it_is_missing(
    kind: str, files: list[str], absent: set[str], command: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_project, "find_spec", lambda name: None if name in absent else object())
    expected = None if command is None else f"pip install {command}"
    assert new_project.install_command(new_project.TEMPLATES / kind, files) == expected


@pytest.mark.parametrize(
    ("name", "code", "expected"),
    [
        ("taken", 78, "'taken' exists already: give a name that is not taken."),
        ("taken/file", 78, "'taken/file' exists already"),
        ("taken/file/x", 74, "'taken/file/x' cannot be created: Not a directory."),
        ("2nd", 78, "'2nd' is not a name for a project"),
        (".hidden", 78, "'.hidden' is not a name for a project"),
        ("..", 78, "'..' is not a name for a project"),
    ],
)
def test_a_name_that_cannot_be_used_is_refused_in_one_line(name: str, code: int, expected: str, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").write_text("mine")
    done = command("new", "classifier", name, cwd=tmp_path)
    assert (done.returncode, len(done.stdout.splitlines())) == (code, 1)
    assert expected in done.stdout
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["taken", "taken/file"]
    assert (tmp_path / "taken/file").read_text() == "mine"
