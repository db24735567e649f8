"""Make phalanx and missing packages importable without an installation or a network.

``offline.py ARGUMENTS`` runs ``python ARGUMENTS`` with them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "wheels"


def fill(site: Path, wheels: Path) -> None:
    """Make phalanx importable from a folder, and the packages of which there are wheels, where they are missing."""
    # Found through this link, a checkout under any name is the package.
    (site / "phalanx").symlink_to(ROOT)
    chosen = [str(wheel) for wheel in sorted(wheels.glob("*.whl")) if _is_wanted(wheel)]
    if chosen:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*command, "--disable-pip-version-check", "--target", str(site), *chosen], check=True)
    print(f"installed from {wheels}: {', '.join(Path(each).name for each in chosen) or 'nothing'}", flush=True)


def _is_wanted(wheel: Path) -> bool:
    """Whether a wheel fits this interpreter, which lacks the package or has an older one."""
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename
    from packaging.version import Version

    name, offered, _, tags = parse_wheel_filename(wheel.name)
    try:
        is_wanted = Version(version(name)) < offered
    except PackageNotFoundError:
        is_wanted = True
    return is_wanted and not frozenset(sys_tags()).isdisjoint(tags)


def search_path(*folders: Path) -> str:
    """Return the value of PYTHONPATH with these folders first."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def main() -> int:
    """Run Python with the arguments of this process; return its exit code."""
    with tempfile.TemporaryDirectory(prefix="phalanx-offline-") as folder:
        site = Path(folder)
        fill(site, WHEELS)
        environment = {**os.environ, "PYTHONPATH": search_path(site)}
        with subprocess.Popen([sys.executable, *sys.argv[1:]], cwd=ROOT, env=environment) as process:
            while True:
                try:
                    return process.wait()
                except KeyboardInterrupt:
                    # It receives Ctrl-C as well, and ends in its own way.
                    continue


if __name__ == "__main__":
    sys.exit(main())
