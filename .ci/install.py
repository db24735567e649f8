"""Install this clone into a virtual environment, with what some of its extras need.

    python .ci/install.py [--clear] VENV [EXTRA ...]

The versions are those of constraints.txt, and the files of each package have a hash in requirements.lock. torch has
none there, as its builds differ: it comes from whichever index offers it. uv installs, from the same indexes as pip;
where uv cannot be had, pip does, which takes several times as long.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from audit import normalized
from lock import LOCK, ROOT, entries

CONSTRAINTS = ROOT / "constraints.txt"
# Settings of pip that say where packages are, and the variables that say so to uv, with what separates several values.
_PLACES = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "cert": ("SSL_CERT_FILE", " "),
}


def places(listed: str) -> dict[str, str]:
    """Return the variables that give uv the indexes of pip, from the output of ``pip config list``."""
    settings = re.findall(r"(?m)^(\S+)\.([\w-]+)='(.*)'$", listed)
    # Variables override files.
    settings.sort(key=lambda setting: setting[0] == ":env:")
    values = {key: value.replace("\\n", " ").split() for _, key, value in settings}
    return {variable: join.join(values[key]) for key, (variable, join) in _PLACES.items() if values.get(key)}


def locked(names: Iterable[str], lock: str) -> str:
    """Return the entries of a lock, with their hashes, for the packages of these names."""
    wanted = {normalized(name) for name in names}
    return "".join(entry for entry in entries(lock) if normalized(entry.partition("==")[0]) in wanted)


def create(venv: Path) -> None:
    """Replace the environment by a new one, which has uv in an environment of its own inside."""
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(venv)], check=True)
    tools = venv / "uv"
    subprocess.run([sys.executable, "-m", "venv", str(tools)], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(locked(["uv"], LOCK.read_text(encoding="utf-8")))
        file.flush()
        pip = [str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--no-deps", "--require-hashes", "-r", file.name], check=False)


def variables(venv: Path) -> dict[str, str]:
    """Return the environment in which uv finds packages where pip does."""
    command = [str(venv / "uv" / "bin" / "python"), "-m", "pip", "config", "list"]
    listed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    # What a user set for uv itself comes first.
    return {**places(listed), **os.environ}


def install(venv: Path, requested: Sequence[str]) -> int:
    """Install distributions with their dependencies.

    Args:
        requested: arguments of ``pip install``: files, or ``--editable`` and a folder with extras.

    Returns:
        The exit code.
    """
    uv, python = venv / "uv" / "bin" / "uv", str(venv / "bin" / "python")
    if not uv.exists():
        print("uv cannot be had from the package index: installing with pip, in several minutes ...", flush=True)
        return _install_by_pip(venv, python, requested)
    # As for pip, any of several indexes may have the pinned version.
    options = ["--python", python, "--index-strategy", "unsafe-best-match", "--no-config"]
    constraints = ["--constraint", str(CONSTRAINTS), "--constraint", str(LOCK)]
    command = [str(uv), "pip", "install", *options, *constraints, *requested]
    return subprocess.run(command, cwd=ROOT, env=variables(venv), check=False).returncode


def _install_by_pip(venv: Path, python: str, requested: Sequence[str]) -> int:
    """Let pip find out which packages are needed, install those with a hash, and then the rest: torch, and this one."""
    pip = [str(venv / "uv" / "bin" / "python"), "-m", "pip", "--python", python, "--disable-pip-version-check"]
    pip += ["install", "--quiet", "--constraint", str(CONSTRAINTS)]
    with tempfile.TemporaryDirectory() as folder:
        report, needed = Path(folder, "report.json"), Path(folder, "needed.txt")
        resolved = [*pip, "--dry-run", "--ignore-installed", "--report", str(report), *requested]
        subprocess.run(resolved, cwd=ROOT, check=True)
        names = [package["metadata"]["name"] for package in json.loads(report.read_text())["install"]]
        needed.write_text(locked(names, LOCK.read_text(encoding="utf-8")))
        hashed = [*pip[:-2], "--no-deps", "--require-hashes", "--requirement", str(needed)]
        subprocess.run(hashed, cwd=ROOT, check=True)
    return subprocess.run([*pip, *requested], cwd=ROOT, check=False).returncode


def main(arguments: list[str]) -> int:
    """Install; say what is done, and how long it took."""
    is_new = arguments[0] == "--clear"
    venv, *extras = arguments[is_new:]
    print(f"Installing phalanx with the extras {', '.join(extras)} into {venv} ...", flush=True)
    begun = time.monotonic()
    if is_new or not Path(venv, "uv").exists():
        create(Path(venv))
    code = install(Path(venv), ["--editable", f".[{','.join(extras)}]"])
    if code == 0:
        print(f"Installed in {time.monotonic() - begun:.0f} s.", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
