"""``phalanx completion``: what bash completes, and scripts of other shells."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest
from command_terminal import command

from phalanx.cli import completion
from phalanx.cli.completion import print_completion

# Calls the function that the script has registered, as bash does after a tab.
_COMPLETE = """
source "$1"; shift
registered=$(complete -p phalanx) || exit 1
function=${registered##*-F }; function=${function%% *}
COMP_WORDS=(phalanx "$@"); COMP_CWORD=$#; COMP_LINE="${COMP_WORDS[*]}"; COMP_POINT=${#COMP_LINE}
"$function" phalanx "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of the script for bash."""
    folder = tmp_path_factory.mktemp("completion")
    done = command("completion", "bash", cwd=folder)
    assert done.returncode == 0, done.stdout
    (file := folder / "script").write_text(done.stdout)
    return file


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sel"], ["selftest"]),
        (["doctor", "--h"], ["--help", "--hosts"]),
        (["new", ""], ["classifier", "lm", "finetune", "gan", "loop"]),
        (["checkpoint", "con"], ["consolidate", "convert"]),
        (["checkpoint", "list", "--v"], ["--verify"]),
        (["selftest", "--accelerator", "c"], ["cpu", "cuda"]),
        (["plan", "tr"], ["train.py", "trials"]),
        (["doctor", "tr"], ["trials"]),
        (["why", "tri"], ["trials"]),
    ],
    ids=" ".join,
)
def test_a_real_bash_completes(words: list[str], expected: list[str], script: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "trials").mkdir()
    bash = ["bash", "--norc", "-c", _COMPLETE, "bash", str(script), *words]
    done = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True, timeout=30.0, check=False)
    assert (done.returncode, done.stderr, sorted(done.stdout.split())) == (0, "", sorted(expected))


@pytest.mark.parametrize(("shell", "start"), [("zsh", "#compdef phalanx"), ("tcsh", "# AUTOMATICALLY GENERATED")])
def test_scripts_of_other_shells(shell: str, start: str, tmp_path: Path) -> None:
    done = command("completion", shell, cwd=tmp_path)
    assert (done.returncode, done.stdout.startswith(start)) == (0, True)
    assert "selftest" in done.stdout


def test_files_that_the_help_leaves_out_are_completed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser("phalanx")
    parser.add_argument("arguments", nargs="...", help=argparse.SUPPRESS)
    monkeypatch.setattr(completion, "build_parser", lambda: parser)
    assert print_completion(argparse.Namespace(shell="bash")) == 0
    assert "_pos_0_COMPGEN=_shtab_compgen_files" in capsys.readouterr().out
