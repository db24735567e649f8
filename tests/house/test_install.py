"""``.ci/install.py``: where uv looks for packages, and which hashes it compares."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    return importlib.import_module("install")


def test_uv_looks_where_pip_looks(install: ModuleType) -> None:
    listed = (
        ":env:.find-links='/wheels'\nglobal.find-links='/old'\nglobal.index-url='https://a/simple'\n"
        "global.extra-index-url='\\nfile:///b file:///c'\nglobal.timeout='60'\n"
    )
    assert install.places(listed) == {
        "UV_FIND_LINKS": "/wheels",
        "UV_DEFAULT_INDEX": "https://a/simple",
        "UV_INDEX": "file:///b file:///c",
    }
    assert install.places("") == {}


def test_pip_gets_the_hashes_of_the_packages_that_are_needed(install: ModuleType) -> None:
    lock = (ROOT / "requirements.lock").read_text()
    found = install.locked(["Lightning_Utilities", "torch", "uv"], lock)
    assert re.findall(r"(?m)^([\w-]+)==", found) == ["lightning-utilities", "uv"]
    assert found.count("--hash=sha256:") > 2


def texts() -> dict[str, str]:
    """Return the text of each tracked Python file and page outside of the tests, by path."""
    tracked = subprocess.run(["git", "ls-files", "*.py", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [name for name in tracked.stdout.splitlines() if not name.startswith("tests/")]
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in files}


def test_each_command_that_installs_a_package_names_one_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    found = {
        package
        for text in texts().values()
        for command in re.findall(r"pip install((?: '[\w\[\]-]+[<>=!][^']*')+)", text)
        for package in re.findall(r"'([^']+)'", command)
    }
    assert found - {"torch>=2.11"} <= set(re.findall(r'"([^"]+)"', project))
    assert len(found) > 5, "the commands are written in another way"
    unpublished = [name for name, text in texts().items() if "install 'phalanx" in text]
    assert unpublished == [], "phalanx is on no package index"


def test_each_command_that_installs_an_extra_names_one_of_the_project() -> None:
    _, _, section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")
    extras = set(re.findall(r"(?m)^(\w+) = \[", section.partition("\n[")[0]))
    found = {
        extra
        for text in texts().values()
        for given in re.findall(r"pip install -c constraints\.txt '\.\[([\w,]+)\]'", text)
        for extra in given.split(",")
    }
    assert found <= extras
    assert len(found) > 8, "the commands are written in another way"


HIDES = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import phalanx
print(phalanx.__file__, *[each.message for each in caught], sep="\\n")
"""


@pytest.mark.parametrize("is_hidden", [True, False])
def test_a_clone_that_hides_the_installed_package_is_reported(is_hidden: bool, tmp_path: Path) -> None:
    parts = ("__init__.py", "framework/__init__.py", "framework/core", "framework/launch")
    for folder in ("site", "work"):
        for part in parts:
            (tmp_path / folder / "phalanx" / part).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / "phalanx" / part).symlink_to(ROOT / part)
        (tmp_path / folder / "phalanx" / "py.typed").touch()
    (tmp_path / "work" / "phalanx" / "pyproject.toml").touch()
    (tmp_path / "work" / "train.py").write_text(HIDES)
    start = tmp_path / "work" / "train.py" if is_hidden else tmp_path / "work" / "phalanx" / "train.py"
    start.write_text(HIDES)
    command = [sys.executable, "-S", str(start)]
    environment = {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    imported, *warned = done.stdout.splitlines()
    assert imported.startswith(str(tmp_path / ("work" if is_hidden else "site")))
    assert len(warned) == is_hidden
    assert all(str(tmp_path / "work" / "phalanx") in each and str(tmp_path / "site") in each for each in warned)
