"""Build the source distribution and the wheel, and train the README's example with the wheel in an empty environment.

    python .ci/package.py [--out dist]

The environment has the Python that runs this script. The wheel is built from the source distribution, so that neither
lacks a file.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from install import ROOT, create, install, variables

_TRAIN_SECONDS = 300.0


def example(readme: str) -> str:
    """Return the first Python program of a page."""
    found = re.search(r"(?ms)^```python\n(.*?)^```", readme)
    if found is None:
        raise ValueError("README.md has no Python example.")
    return found.group(1)


def left_by_builds() -> set[Path]:
    """Return what builds have left in the clone."""
    return {path for path in (ROOT / "build", *ROOT.glob("*.egg-info")) if path.exists()}


def built(venv: Path, out: Path) -> Path:
    """Build both distributions into ``out``; return the wheel."""
    command = [str(venv / "uv" / "bin" / "uv"), "build", "--quiet", "--out-dir", str(out), str(ROOT)]
    subprocess.run(command, cwd=ROOT, env=variables(venv), check=True)
    return max(out.glob("*.whl"), key=lambda wheel: wheel.stat().st_mtime)


def trained(venv: Path) -> None:
    """Run the README's example as a script of a user, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(example((ROOT / "README.md").read_text(encoding="utf-8")))
        command = [str(venv / "bin" / "python"), "train.py"]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=_TRAIN_SECONDS)
        reports = list(Path(folder).rglob("report.html"))
        if not reports:
            raise FileNotFoundError("The example has left no report.html.")


def main() -> int:
    """Build, install, train; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: %(default)s")
    out: Path = parser.parse_args().out
    before = left_by_builds()
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder, "venv")
        create(venv)
        wheel = built(venv, out)
        if code := install(venv, [str(wheel)]):
            return code
        trained(venv)
    if left := left_by_builds() - before:
        print("Building has left in the clone:", *left, file=sys.stderr)
        return 1
    print(f"Built {wheel.name} and its source distribution in {out}; the README's example trains with it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
