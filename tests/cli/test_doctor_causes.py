"""``phalanx doctor`` on a machine with real defects: an occupied port, a full disk, and others, in one process each."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from called_command import CalledCommand
from command_terminal import Terminal, shown_lines
from ranks import run_command

import phalanx
from phalanx.cli.host_checks import check_hosts
from phalanx.cli.machine_checks import Check, check_gpu_health

_MOUNTS = "mount -t tmpfs -o size=256k tmpfs {disk} && mount -t tmpfs -o size=64m tmpfs /dev/shm && "


def can_mount() -> bool:
    """Whether a process may mount file systems that it alone sees."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, timeout=10.0, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.timeout(240)
def test_a_machine_with_five_defects(tmp_path: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    (tmp_path / "torch-2.5.1.dist-info").mkdir()
    (tmp_path / "torch-2.5.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    paths = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    variables = {"PYTHONPATH": paths, "CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")}
    # Without the right to mount file systems there are three; test_doctor.py replaces the figures of the others.
    mounts = can_mount()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        doctor = [sys.executable, "-m", "phalanx", "doctor", str(disk), "--port", str(port), "--json"]
        if mounts:
            doctor = ["unshare", "-m", "sh", "-c", _MOUNTS.format(disk=disk) + shlex.join(doctor)]
        done = run_command(doctor, tmp_path, variables, timeout=120.0)
    document = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert (done.returncode, document["good"]) == (69, False)
    checks: dict[str, dict[str, Any]] = {check["name"]: check for check in document["checks"]}

    def assert_defect(name: str, found: str, advice: str = "") -> None:
        check = checks[name]
        assert not check["good"], check
        assert found in check["found"]
        assert advice in check["advice"]

    assert_defect("port", f"port {port}: Address already in use", "MASTER_PORT")
    assert_defect("torch", "2.5.1", "2.11 to 2.15")
    assert_defect("tools", "no 'no-such-compiler' on PATH")
    if mounts:
        assert_defect("room", "262 KB free in ")
        assert_defect("/dev/shm", "67.1 MB", "--shm-size")
    assert checks["cpu_adam"]["found"] == "not built yet (--build builds it)"
    assert all(checks[name]["good"] for name in ("python", "open files", "two CPU ranks", "devices"))


SSH = """#!/bin/sh
# Takes the place of ssh: options, then the host, then the command.
while [ "${1#-}" != "$1" ]; do shift 2; done
case "$1" in
  good) sh -c "$2" ;;
  old) sh -c "$2" | sed 's/"torch": "[^"]*"/"torch": "2.5.1"/' ;;
  late) sh -c "$2" | sed 's/"time": 1/"time": 2/' ;;
  near) sh -c "$2" | awk '{ seconds = $2 - 2.5; sub(/[0-9.]+/, sprintf("%.3f", seconds)); print }' ;;
  loud) echo "welcome to the cluster"; sh -c "$2" ;;
  *) echo "ssh: Could not resolve hostname $1: Name or service not known" >&2; exit 255 ;;
esac
"""


@pytest.fixture
def _ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def failing(checks: Iterator[Check]) -> dict[str, str]:
    return {check.name: check.found for check in checks if not check.good}


@pytest.mark.usefixtures("_ssh")
def test_hosts_that_answer_and_hosts_that_do_not() -> None:
    assert failing(check_hosts(["good", "loud", "near"])) == {}
    found = failing(check_hosts(["gone", "old", "late"]))
    assert set(found) == {"gone", "old versions", "late clock"}
    assert found["gone"] == "ssh: Could not resolve hostname gone: Name or service not known"
    assert found["old versions"].startswith("torch 2.5.1 and ")
    assert found["late clock"].endswith(" s ahead")


@pytest.mark.usefixtures("_ssh")
def test_the_advice_on_clocks_is_that_of_the_page_about_clusters() -> None:
    advice = next(check.advice for check in check_hosts(["late"]) if not check.good)
    number = advice.removeprefix("synchronize it to within ").partition(" s, ")[0]
    page = (Path(phalanx.__file__).parent / "docs" / "clusters.md").read_text()
    assert f"Synchronize the clocks of the nodes to within {number} seconds" in page


NVIDIA_SMI = """#!/bin/sh
case "$1" in *clocks_event*) [ -n "$OLD_DRIVER" ] && { echo 'Field "x" is not a valid field.'; exit 2; } ;; esac
[ -n "$MUTE" ] && { echo >&2; exit 9; }
[ -n "$BROKEN" ] && { echo "NVIDIA-SMI has failed because it couldn't communicate with the driver."; exit 9; }
echo "0, 550.54, 41, 0, 0x0000000000000001"
echo "1, 550.54, 92, 7, 0x0000000000000040"
echo "2, 550.54, 40, [N/A], 0x0000000000000004"
"""


@pytest.mark.parametrize("variable", ["NEW_DRIVER", "OLD_DRIVER"])
def test_gpus_with_memory_errors_and_heat(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv(variable, "1")
    found = list(check_gpu_health())
    assert failing(iter(found)) == {"memory 1": "driver 550.54, 7 uncorrected", "clocks 1": "92 C, too hot"}
    assert {check.name: check.found for check in found}["memory 2"] == "driver 550.54, no ECC"
    monkeypatch.setenv("BROKEN", "1")
    assert failing(check_gpu_health())["nvidia-smi"].startswith("NVIDIA-SMI has failed because")
    monkeypatch.setenv("MUTE", "1")
    assert failing(check_gpu_health()) == {"nvidia-smi": "nvidia-smi ended with exit code 9"}


def test_a_machine_without_a_driver_is_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(check_gpu_health()) == []


@pytest.mark.timeout(120)
def test_the_checks_fit_a_terminal_of_80_columns(tmp_path: Path) -> None:
    lines = shown_lines(Terminal(["doctor", "--ranks", str(1 << 40)], tmp_path).end(69))
    assert max(map(len, lines)) <= 80
    assert {"software", "storage", "limits", "network", "ranks", "GPUs", "DeepSpeed"} <= set(lines)
    assert any(line.startswith("  todo open files ") for line in lines)
    advice = next(line for line in lines if "ulimit -Hn" in line)
    assert advice.startswith(" " * 28)


def test_wrong_arguments_are_answered_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        (["nowhere"], "nowhere"),
        (["--ranks", "0"], "--ranks"),
        (["--port", "65536"], "--port 65536: give a number up to 65535"),
        (["--hosts", "a,,b"], "'' is not the name of a host"),
        (["--hosts=-oProxyCommand=x"], "'-oProxyCommand=x' is not the name of a host"),
    ):
        done = CalledCommand("doctor", capsys)(*arguments)
        assert (done.code, done.out, len(done.err.splitlines())) == (78, "", 1)
        assert expected in done.err
