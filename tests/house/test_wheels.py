"""``make wheels``: pinned versions, for another machine's Python."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("wheels", ROOT / ".ci" / "wheels.py")
assert _spec is not None
assert _spec.loader is not None
wheels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wheels)


def test_all_default_packages_are_pinned() -> None:
    pinned = re.findall(r"(?m)^([\w.-]+)==", (ROOT / "constraints.txt").read_text())
    names = {re.sub(r"[-_.]+", "-", name).lower() for name in pinned}
    assert set(wheels.NAMES) <= names


def test_only_wheels_of_the_other_python_are_downloaded() -> None:
    command = wheels.download("hjson", "3.13", Path("there"))
    assert command[command.index("--python-version") + 1] == "3.13"
    assert {"--only-binary=:all:", "--no-deps", "manylinux2014_x86_64"} <= set(command)
    assert command[-1] == "hjson"


def test_a_package_that_exists_as_source_is_built_in_the_same_version() -> None:
    command = wheels.build("deepspeed", Path("there"))
    assert command[command.index("--constraint") + 1] == str(ROOT / "constraints.txt")
    assert "--no-deps" in command
