"""``phalanx doctor``: what it finds on a machine that is not in order, and what it says about this one."""

from __future__ import annotations

import json
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from ranks import run_command

from phalanx.cli.machine_checks import (
    Check,
    check_limits,
    check_ranks,
    check_software,
    check_storage,
)
from phalanx.framework.core.errors import RankError


def failing(checks: object) -> dict[str, Check]:
    """Return the checks that have failed by name; each says what to do."""
    found = {check.name: check for check in checks if not check.good}  # type: ignore[attr-defined]
    assert all(check.advice for check in found.values())
    return found


@pytest.mark.parametrize(
    ("release", "good"), [("2.10.1", False), ("2.11.0+cpu", True), ("2.15.2", True), ("3.0", False)]
)
def test_versions_of_torch(release: str, good: bool) -> None:
    assert ("torch" not in failing(check_software(lambda package: release))) == good


def test_torch_that_is_not_installed() -> None:
    def version(package: str) -> str:
        raise PackageNotFoundError(package)

    assert failing(check_software(version))["torch"].found == "not installed"


def test_the_libraries_of_loggers_are_shown_and_none_is_required() -> None:
    def version(package: str) -> str:
        if package == "wandb":
            raise PackageNotFoundError(package)
        return "2.15.0"

    checks = list(check_software(version))
    assert failing(checks) == {}
    assert {check.name: check.found for check in checks if check.group == "loggers"} == {
        "tensorboard": "2.15.0", "wandb": "not installed (optional)", "mlflow": "2.15.0", "trackio": "2.15.0",
    }  # fmt: skip


def test_a_full_disk_and_one_that_cannot_be_written(tmp_path: Path) -> None:
    assert "room" in failing(check_storage(tmp_path, free=lambda path: 1 << 20))
    assert failing(check_storage(tmp_path / "missing", free=lambda path: 1 << 40))["write"].found.endswith(
        "No such file or directory"
    )
    names = [check.name for check in check_storage(tmp_path)]
    assert names == ["room", "write", "rename"]
    assert list(tmp_path.iterdir()) == []


def test_little_shared_memory_and_few_open_files(tmp_path: Path) -> None:
    assert "--shm-size" in failing(check_limits(1, size=64 << 20))["/dev/shm"].advice
    assert "/dev/shm" not in failing(check_limits(1, size=8 << 30))
    assert list(failing(check_limits(1 << 40, size=8 << 30))) == ["open files"]


def test_ranks_that_do_not_meet() -> None:
    def broken() -> float:
        raise RankError("rank 1 failed\nmore")

    assert failing(check_ranks(broken))["two CPU ranks"].found == "rank 1 failed"


@pytest.mark.timeout(240)
def test_the_command_on_this_machine(tmp_path: Path) -> None:
    done = run_command([sys.executable, "-m", "phalanx", "doctor", "--json", "--paste"], tmp_path, timeout=200.0)
    found = json.loads(done.stdout)
    assert done.returncode == (0 if found["good"] else 69)
    assert found["good"] == all(check["good"] for check in found["checks"])
    names = {check["name"]: check for check in found["checks"]}
    assert names["two CPU ranks"]["good"], names["two CPU ranks"]
    assert found["provenance"]["versions"]["torch"] == names["torch"]["found"]
    assert list(tmp_path.iterdir()) == []
