"""``make audit``: what it finds in an installation."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from importlib.metadata import Distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("audit", ROOT / ".ci" / "audit.py")
assert _spec is not None
assert _spec.loader is not None
audit = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(audit)


def installed(folder: Path, name: str, version: str) -> Distribution:
    """Return a package with one file."""
    (folder / "code.py").write_text("x = 1\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(b"x = 1\n").digest()).decode().rstrip("=")
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"code.py,sha256={digest},6\n{info.name}/RECORD,,\n")
    return Distribution.at(info)


@pytest.mark.parametrize(
    ("name", "version", "told"),
    [
        ("Some_Thing", "1.0", []),
        ("torch", "2.0+cpu", []),
        ("torch", "2.1+cpu", ["torch 2.1+cpu is installed, and the constraints name 1.9 or 2.0."]),
        ("other", "1.0", ["other 1.0 is not in the constraints."]),
        ("nvidia-nccl", "7", []),
        ("lightning", "2.6.3", ["lightning 2.6.3 is malicious", "lightning 2.6.3 is not in the constraints."]),
    ],
)
def test_versions(tmp_path: Path, name: str, version: str, told: list[str]) -> None:
    allowed = audit.pinned("# x==3\nsome.thing==1.0\ntorch==2.0 ; python_version >= '3.11'\ntorch==1.9\n")
    found = list(audit.findings(installed(tmp_path, name, version), allowed))
    assert len(found) == len(told)
    assert all(sentence.startswith(start) for sentence, start in zip(found, told, strict=True))


def test_files(tmp_path: Path) -> None:
    package, allowed = installed(tmp_path, "thing", "1.0"), {"thing": {"1.0"}}
    assert list(audit.findings(package, allowed)) == []
    (tmp_path / "code.py").write_text("x = 2\n")
    assert list(audit.findings(package, allowed)) == ["thing: code.py was changed after the installation."]
    (tmp_path / "code.py").unlink()
    assert list(audit.findings(package, allowed)) == ["thing: code.py cannot be read (No such file or directory)."]


def test_the_malicious_releases_are_excluded_wherever_the_package_is_asked_for() -> None:
    asked = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if '"lightning>' in line]
    assert len(asked) == 2
    assert all("!=2.6.2,!=2.6.3" in line for line in asked)
