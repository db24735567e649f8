"""``make check`` on a machine that lacks system packages: what it installs, leaves out, and says in its last line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = "Left out: the tests of NVMe offload, as libaio-dev is missing. As root: apt-get install libaio-dev"

_OF_MAKE = ("MAKE", "MFLAGS", "COMPLETE", "PYTHON")

# The compiler finds libaio.h once apt-get has installed it; all programs note their arguments.
PROGRAMS = {
    "fake-c++": "[ -e libaio-dev ]",
    "apt-get": 'for last; do :; done; case " $* " in *" install "*) [ -e network ] && touch "$last";; esac',
    "sudo": '[ -e password ] && exit 1; shift; "$@"',
    "id": "cat user",
    "python": "true",
}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return the folder of a machine without libaio, on which this is an ordinary user."""
    for name, body in PROGRAMS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\ncd {tmp_path}\necho "{name} $*" >> calls\n{body}\n')
        program.chmod(0o755)
    (tmp_path / "user").write_text("1000\n")
    (tmp_path / "calls").touch()
    return tmp_path


def run(machine: Path, *command: str) -> tuple[int, list[str], str]:
    """Run a command on the machine; return its exit code, its lines, and the calls of programs."""
    path = f"{machine / 'bin'}:{os.environ['PATH']}"
    # Otherwise a make around this test passes its own settings on.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_OF_MAKE)}
    done = subprocess.run(
        command,
        env={**inherited, "PATH": path, "CXX": "fake-c++"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.splitlines(), (machine / "calls").read_text()


def make(machine: Path, *arguments: str) -> tuple[int, list[str], str]:
    """Run `make` with an environment that is complete, and a Python that only notes its arguments."""
    venv = machine / "venv"
    venv.mkdir(exist_ok=True)
    for stamp in ("demo", "dev"):
        (venv / f"{stamp}.{str(ROOT).replace('/', '_').replace(' ', '_')}").touch()
    return run(machine, "make", f"VENV={venv}", f"PY={machine / 'bin' / 'python'}", *arguments)


def test_what_is_missing_is_installed_by_root(machine: Path) -> None:
    (machine / "user").write_text("0\n")
    (machine / "network").touch()
    assert run(machine, ".ci/tools", "missing")[:2] == (0, ["libaio-dev"])
    assert run(machine, ".ci/tools", "install")[:2] == (0, [])
    code, lines, calls = run(machine, ".ci/tools", "missing")
    assert (code, lines) == (0, [])
    assert "install -qq -y --no-install-recommends" in calls
    assert "sudo" not in calls


@pytest.mark.parametrize("lacking", ["nothing", "password", "network"])
def test_an_ordinary_user_installs_with_sudo_as_far_as_that_goes(machine: Path, lacking: str) -> None:
    if lacking != "network":
        (machine / "network").touch()
    if lacking == "password":
        (machine / "password").touch()
    assert run(machine, ".ci/tools", "install")[0] == 0
    _, lines, calls = run(machine, ".ci/tools", "missing")
    assert lines == ([] if lacking == "nothing" else ["libaio-dev"])
    assert ("apt-get" in calls) == (lacking != "password")


def test_the_last_line_of_the_tests_lists_tests_that_were_left_out(machine: Path) -> None:
    code, lines, calls = make(machine, "check")
    assert (code, lines[-1]) == (0, LEFT_OUT)
    assert "-m phalanx.strategies.deepspeed.ops --without async_io" in calls
    assert "-m not nvme" in calls


def test_nothing_is_left_out_where_nothing_is_missing(machine: Path) -> None:
    (machine / "libaio-dev").touch()
    code, lines, calls = make(machine, "check", "COMPLETE=1")
    assert code == 0
    assert LEFT_OUT not in lines
    assert "nvme" not in calls
    assert "--without" not in calls


def test_continuous_integration_fails_before_it_leaves_anything_out(machine: Path) -> None:
    code, lines, calls = make(machine, "check", "COMPLETE=1")
    assert (code != 0, lines[-1]) == (True, LEFT_OUT)
    assert "pytest" not in calls
    assert "COMPLETE=1 make check" in (ROOT / ".ci" / "run").read_text()
