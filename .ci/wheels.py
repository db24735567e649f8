"""Download wheels for a machine without network: `python .ci/wheels.py [--python 3.12] [NAME ...]`.

The default names are those of the packages that DeepSpeed and torchao need and that an environment for PyTorch often
lacks; their versions are those of constraints.txt. A package without a wheel is built, which must not compile anything.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES = (
    "deepspeed",
    "hjson",
    "torchao",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-extensions",
    "typing-inspection",
)
_MEBIBYTE = 1 << 20
# pip compares the C library's version exactly.
_OLDEST, _NEWEST = 17, 39


def download(name: str, python: str, folder: Path) -> list[str]:
    """Return the command that downloads the wheel of a package for a version of Python on x86-64."""
    versions = range(_NEWEST, _OLDEST - 1, -1)
    platforms = [*(f"manylinux_2_{number}_x86_64" for number in versions), "manylinux2014_x86_64"]
    target = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    options = [option for platform in platforms for option in ("--platform", platform)]
    return [*_pip("download", folder), *target, *options, name]


def build(name: str, folder: Path) -> list[str]:
    """Return the command that builds the wheel of a package that is published as source only."""
    return [*_pip("wheel", folder), name]


def _pip(verb: str, folder: Path) -> list[str]:
    pip = [sys.executable, "-m", "pip", verb, "--quiet", "--disable-pip-version-check", "--no-deps"]
    return [
        *pip,
        "--constraint",
        str(ROOT / "constraints.txt"),
        "--dest" if verb == "download" else "--wheel-dir",
        str(folder),
    ]


def main(arguments: Sequence[str]) -> int:
    """Fill the folder; return 1 if a package has no wheel for that machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, metavar="NAME")
    parser.add_argument("--python", default="3.12", help="the version of that machine's Python (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=ROOT / "wheels", help="default: %(default)s")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    for old in given.folder.glob("*.whl"):
        old.unlink()
    missing = []
    for name in given.names:
        found = subprocess.run(download(name, given.python, given.folder), check=False, capture_output=True, text=True)
        if found.returncode and subprocess.run(build(name, given.folder), check=False).returncode:
            print(found.stderr, file=sys.stderr)
            missing.append(name)
    wheels = sorted(given.folder.glob("*.whl"))
    # Built here, for this machine alone.
    foreign = [wheel.name for wheel in wheels if wheel.stem.endswith("linux_x86_64") and "manylinux" not in wheel.stem]
    for wheel in wheels:
        print(f"{wheel.stat().st_size / _MEBIBYTE:7.2f} MiB  {wheel.name}")
    for name in [*missing, *foreign]:
        print(f"There is no wheel of {name} for Python {given.python} on every x86-64 machine.", file=sys.stderr)
    return 1 if missing or foreign else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
