"""``requirements.lock``: it holds what constraints.txt and pyproject.toml ask for, with hashes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
CONSTRAINTS, PROJECT, LOCK = ("constraints.txt", "pyproject.toml", "requirements.lock")
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
HASH = "    --hash=sha256:" + "0" * 64


def versions(text: str, python: str) -> dict[str, str]:
    """Return the version of each package that a list of pins asks for on Linux, under a version of Python."""
    machine = {
        "python_version": python,
        "python_full_version": f"{python}.1",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    found = {}
    for line in re.findall(r"(?m)^[\w.-]+==[^\n\\]*", text):
        pin = Requirement(line)
        if pin.marker is None or pin.marker.evaluate(machine):
            found[re.sub(r"[-_.]+", "-", pin.name).lower()] = str(pin.specifier)
    return found


def differences(constraints: str, lock: str, python: str) -> dict[str, tuple[str | None, str | None]]:
    """Return the packages, torch aside, with the version in each file where the two files differ."""
    pinned, locked = versions(constraints, python), versions(lock, python)
    names = (pinned.keys() | locked.keys()) - {"torch"}
    return {name: (pinned.get(name), locked.get(name)) for name in names if pinned.get(name) != locked.get(name)}


def without_hash(lock: str) -> list[str]:
    """Return the entries that no sha256 follows."""
    lines = [*lock.splitlines(), ""]
    is_hash = [re.fullmatch(r" +--hash=sha256:[0-9a-f]{64}( \\)?", line) is not None for line in lines]
    return [line for line, hashed in zip(lines, is_hash[1:], strict=False) if "==" in line and not hashed]


def unsatisfied(project: str, lock: str, python: str) -> list[str]:
    """Return the requirements of a project, torch aside, that the versions of a lock do not satisfy."""
    locked = versions(lock, python)
    asked = [Requirement(found) for found in re.findall(r'"([a-z][\w-]*[<>=!~][^"]*)"', project)]
    return [
        str(each)
        for each in asked
        if each.name != "torch" and (each.name not in locked or locked[each.name][2:] not in each.specifier)
    ]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_agrees_with_the_constraints_and_the_project(python: str) -> None:
    constraints, project, lock = ((ROOT / name).read_text() for name in (CONSTRAINTS, PROJECT, LOCK))
    assert differences(constraints, lock, python) == {}, "run `make lock`"
    assert unsatisfied(project, lock, python) == [], "run `make lock`"


def test_every_entry_has_a_hash_and_none_belongs_to_a_build_of_torch() -> None:
    lock = (ROOT / LOCK).read_text()
    assert without_hash(lock) == []
    assert not re.search(r"(?m)^(torch|triton|nvidia-.*|cuda-.*)==", lock)


def test_every_kind_of_disagreement_is_found() -> None:
    constraints = "a_b==1\nc==2 ; python_version >= '3.11'\nd==3\ntorch==2\n"
    lock = f"A-B==1 \\\n{HASH} \\\n{HASH}\nc==2\nd==4 \\\n{HASH}\n"
    assert differences(constraints, lock, "3.10") == {"c": (None, "==2"), "d": ("==3", "==4")}
    assert differences(constraints, lock, "3.11") == {"d": ("==3", "==4")}
    assert without_hash(lock) == ["c==2"]
    project = 'requires-python = ">=3.10"\nx = ["d>=5", "c<3", "missing!=1", "torch>=9"]'
    assert unsatisfied(project, lock, "3.12") == ["d>=5", "missing!=1"]
