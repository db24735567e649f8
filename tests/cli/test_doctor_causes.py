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
from command_terminal import Terminal, shown_lines, warm_command
from ranks import run_command

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


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return the checks by name, of a machine with five defects."""
    folder = tmp_path_factory.mktemp("defects")
    (disk := folder / "disk").mkdir()
    (folder / "torch-2.5.1.dist-info").mkdir()
    (folder / "torch-2.5.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    paths = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    variables = {"PYTHONPATH": paths, "CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(folder / "ops")}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        doctor = [sys.executable, "-m", "phalanx", "doctor", str(disk), "--port", port, "--json"]
        if can_mount():
            doctor = ["unshare", "-m", "sh", "-c", _MOUNTS.format(disk=disk) + shlex.join(doctor)]
        done = run_command(doctor, folder, variables, timeout=120.0)
    document = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert (done.returncode, document["good"]) == (69, False)
    checks = {check["name"]: check for check in document["checks"]}
    checks["port"]["given"] = port
    return checks


def test_an_occupied_port(found: dict[str, dict[str, Any]]) -> None:
    port = found["port"]
    assert (port["good"], port["found"]) == (False, f"port {port['given']}: Address already in use")
    assert "MASTER_PORT" in port["advice"]


def test_a_wrong_version(found: dict[str, dict[str, Any]]) -> None:
    assert (found["torch"]["good"], found["torch"]["found"]) == (False, "2.5.1")
    assert "2.11 to 2.15" in found["torch"]["advice"]


def test_a_missing_compiler(found: dict[str, dict[str, Any]]) -> None:
    assert not found["tools"]["good"]
    assert "no 'no-such-compiler' on PATH" in found["tools"]["found"]
    assert found["cpu_adam"]["found"] == "not built yet (--build builds it)"


@pytest.mark.skipif(not can_mount(), reason="may not mount file systems; test_doctor.py replaces the figures")
def test_a_full_disk_and_little_shared_memory(found: dict[str, dict[str, Any]]) -> None:
    assert not found["room"]["good"]
    assert found["room"]["found"].startswith("262 KB free in ")
    assert (found["/dev/shm"]["good"], found["/dev/shm"]["found"]) == (False, "67.1 MB")
    assert "--shm-size" in found["/dev/shm"]["advice"]


def test_what_is_in_order_stays_so(found: dict[str, dict[str, Any]]) -> None:
    assert all(found[name]["good"] for name in ("python", "open files", "two CPU ranks", "devices"))


SSH = """#!/bin/sh
# Takes the place of ssh: options, then the host, then the command.
while [ "${1#-}" != "$1" ]; do shift 2; done
case "$1" in
  good) sh -c "$2" ;;
  old) sh -c "$2" | sed 's/"torch": "[^"]*"/"torch": "2.5.1"/' ;;
  late) sh -c "$2" | sed 's/"time": 1/"time": 2/' ;;
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
    assert failing(check_hosts(["good", "loud"])) == {}
    found = failing(check_hosts(["gone", "old", "late"]))
    assert set(found) == {"gone", "old versions", "late clock"}
    assert found["gone"] == "ssh: Could not resolve hostname gone: Name or service not known"
    assert found["old versions"].startswith("torch 2.5.1 and ")
    assert found["late clock"].endswith(" s ahead")


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


def test_wrong_hosts_and_ports_are_answered_in_one_line(tmp_path: Path) -> None:
    for arguments, expected in (
        (["--port", "65536"], "--port 65536: give a number up to 65535"),
        (["--hosts", "a,,b"], "'' is not the name of a host"),
        (["--hosts=-oProxyCommand=x"], "'-oProxyCommand=x' is not the name of a host"),
    ):
        done = warm_command("doctor", *arguments, cwd=tmp_path)
        assert (done.returncode, len(done.stdout.splitlines())) == (78, 1)
        assert expected in done.stdout
