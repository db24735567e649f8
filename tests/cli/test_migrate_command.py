"""The command ``phalanx migrate``: what it prints and writes, its exit codes, and files that it cannot read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from called_command import CalledCommand
from ranks import run_command

SCRIPT = "import lightning\n\ntrainer = lightning.Trainer(max_epoch=1)\n"
MIGRATED = "import phalanx\n\ntrainer = phalanx.Trainer(max_epoch=1)\n"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CalledCommand:
    return CalledCommand("migrate", capsys)


def script(directory: Path, name: str = "train.py", text: str = SCRIPT) -> Path:
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_the_differences_are_printed_and_nothing_is_written(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = run("train.py")
    assert done.code == 0
    assert done.out.splitlines() == [
        "--- train.py",
        "+++ train.py",
        "@@ -1,3 +1,3 @@",
        "-import lightning",
        "+import phalanx",
        " ",
        "-trainer = lightning.Trainer(max_epoch=1)",
        "+trainer = phalanx.Trainer(max_epoch=1)",
        "train.py:3: Trainer(max_epoch=1): there is no such argument. Did you mean 'max_epochs'? "
        "See docs/migrating-from-lightning.md.",
        "1 file to change, 2 replacements; 1 line left to you; --write applies them",
    ]
    assert (tmp_path / "train.py").read_text() == SCRIPT


def test_patch_applies_the_printed_differences(tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = script(tmp_path, text="import lightning\r\n\r\nlightning.Trainer()  # no line break at the end")
    monkeypatch.chdir(tmp_path)
    done = run("train.py")
    subprocess.run(["patch", "--binary", "-p0"], input=done.out.encode(), cwd=tmp_path, check=True, capture_output=True)
    assert file.read_bytes() == b"import phalanx\r\n\r\nphalanx.Trainer()  # no line break at the end"


def test_write_replaces_the_file_as_a_whole(tmp_path: Path, run: Any) -> None:
    file = script(tmp_path)
    file.chmod(0o754)
    before = file.stat().st_ino
    done = run(file, "--write")
    assert (done.code, done.err) == (0, "")
    assert "---" not in done.out
    assert "1 file written, 2 replacements; 1 line left to you\n" in done.out
    assert file.read_text() == MIGRATED
    assert file.stat().st_mode & 0o777 == 0o754
    assert file.stat().st_ino != before  # A new file took its place; none was open half written.
    assert os.listdir(tmp_path) == ["train.py"]


def test_a_second_run_changes_nothing_and_lists_what_is_left_again(tmp_path: Path, run: Any) -> None:
    file = script(tmp_path)
    left = run(file, "--write").out.splitlines()[:-1]
    assert "max_epoch" in left[0]
    written = file.stat().st_mtime_ns
    assert run(file, "--write").out.splitlines() == [*left, "0 files written, 0 replacements; 1 line left to you"]
    assert file.stat().st_mtime_ns == written


def test_a_line_names_one_page(tmp_path: Path, run: Any) -> None:
    done = run(script(tmp_path, text="from lightning.pytorch.loggers import NeptuneLogger\n"))
    line = done.out.splitlines()[0]
    assert line.endswith("with name, version and log_metrics. See docs/extending.md.")
    assert line.count("docs/") == 1


@pytest.mark.parametrize(
    ("program", "line", "title", "page"),
    [
        ("import transformers\n\ntrainer = transformers.Trainer()\n", 3, "transformers' Trainer", "hf-trainer"),
        ("from composer import ComposerModel\n\n\nclass Net(ComposerModel): ...\n", 4, "Composer", "composer"),
    ],
)
def test_the_page_about_a_framework_that_is_not_rewritten_is_named_once(
    tmp_path: Path, run: Any, program: str, line: int, title: str, page: str
) -> None:
    file = script(tmp_path, text=program)
    left, summary = run(file, "--write").out.splitlines()
    assert left.startswith(f"{file}:{line}: programs of {title} are not rewritten: ")
    assert left.endswith(f"See docs/migrating-from-{page}.md.")
    assert summary == "0 files written, 0 replacements; 1 line left to you"
    assert file.read_text() == program


def test_a_link_stays_a_link(tmp_path: Path, run: Any) -> None:
    file = script(tmp_path, "real/train.py")
    link = tmp_path / "train.py"
    link.symlink_to(file)
    assert run(link, "--write").code == 0
    assert link.is_symlink()
    assert file.read_text() == MIGRATED


def test_a_file_that_cannot_be_written_is_left_and_the_others_are_written(tmp_path: Path, run: Any) -> None:
    first, second = script(tmp_path, "a.py"), script(tmp_path, "b.py")
    first.chmod(0o444)
    done = run(tmp_path, "--write")
    assert done.code == 74
    assert f"{first} is read-only; nothing was changed in it." in done.err
    assert (first.read_text(), second.read_text()) == (SCRIPT, MIGRATED)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"import lightning\ndef f(:\n    pass\n", "line 2 is not valid Python"),
        (b"import lightning\nname = '\xff'\n", "its text cannot be decoded"),
        (b"# coding: nonsense\nimport lightning\n", "it is not valid Python: unknown encoding: nonsense"),
        (b"import lightning\0\n", "it is not valid Python: source code string cannot contain null bytes"),
    ],
)
def test_a_file_that_is_not_python_is_one_sentence(tmp_path: Path, run: Any, content: bytes, reason: str) -> None:
    broken, good = tmp_path / "broken.py", script(tmp_path)
    broken.write_bytes(content)
    done = run(tmp_path, "--write")
    assert done.code == 65
    assert done.err.startswith(f"phalanx: {broken}: ")
    assert reason in done.err
    assert done.err.count("\n") == 1
    assert (broken.read_bytes(), good.read_text()) == (content, MIGRATED)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-8", "utf-8-sig"])
def test_the_encoding_of_a_file_stays(tmp_path: Path, run: Any, encoding: str) -> None:
    file = tmp_path / "train.py"
    before = (
        f"# coding: {encoding.removesuffix('-sig')}\n# Schrödinger\nimport lightning  # ü\n"
        "from lightning import Trainer as Größe\n\n"
        "names = 'ä', lightning.Trainer(max_epochs=1), Größe()\n"
    )
    file.write_bytes(before.encode(encoding))
    assert run(file, "--write").code == 0
    assert file.read_bytes() == before.replace("lightning", "phalanx").encode(encoding)


def test_directories_are_searched(tmp_path: Path, run: Any) -> None:
    for name in ("a/train.py", "a/b/c.py", ".venv/lib/x.py", "a/__pycache__/y.py", "a/notes.txt"):
        script(tmp_path, name)
    script(tmp_path, "a/conf/trainer.yaml", "callbacks:\n- class_path: lightning.pytorch.callbacks.Timer\n")
    found = json.loads(run(tmp_path, "--json").out)
    assert [Path(each["path"]).relative_to(tmp_path).as_posix() for each in found["files"]] == [
        "a/train.py",
        "a/b/c.py",
        "a/conf/trainer.yaml",
    ]
    assert all(each["changed"] for each in found["files"])


def test_json(tmp_path: Path, run: Any) -> None:
    file = script(tmp_path)
    done = run(file, "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert (found["schema"], found["written"]) == (1, False)
    assert found["files"] == [
        {
            "path": str(file),
            "changed": True,
            "error": None,
            "replacements": [
                {"line": 1, "old": "import lightning", "new": "import phalanx"},
                {"line": 3, "old": "lightning.Trainer", "new": "phalanx.Trainer"},
            ],
            "left": [
                {
                    "line": 3,
                    "reason": "Trainer(max_epoch=1): there is no such argument. Did you mean 'max_epochs'?",
                    "page": "docs/migrating-from-lightning.md",
                }
            ],
        }
    ]
    assert file.read_text() == SCRIPT


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["absent.py"], "'absent.py' does not exist: give Python scripts, YAML files or directories."),
        (["notes.txt"], "'notes.txt' is neither a Python script nor a YAML file."),
        (["train.py", "--wrte"], "'--wrte' is not known here. Did you mean '--write'?"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    script(tmp_path, "notes.txt")
    script(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = run(*arguments)
    assert done.code == 78
    assert done.err.startswith(f"phalanx: {sentence}")


def test_it_says_which_package_is_missing(tmp_path: Path) -> None:
    file = script(tmp_path)
    code = "import sys; sys.modules['libcst'] = None; from phalanx.cli.main import main; sys.exit(main(sys.argv[1:]))"
    done = run_command([sys.executable, "-c", code, "migrate", str(file)], tmp_path)
    assert done.returncode == 78
    assert len(done.stdout.splitlines()) == 1
    assert "libcst" in done.stdout
