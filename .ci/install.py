"""Install this clone into a virtual environment, with what some of its extras need.

    python .ci/install.py VENV [EXTRA ...]

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
from collections.abc import Iterable
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


def install(venv: Path, project: str) -> int:
    """Install a project with its dependencies; return the exit code."""
    tools, python = venv / "uv" / "bin", str(venv / "bin" / "python")
    pip = [str(tools / "python"), "-m", "pip"]
    if not (tools / "uv").exists():
        print("uv cannot be had from the package index: installing with pip, in several minutes ...", flush=True)
        return _install_by_pip([*pip, "--python", python, "--disable-pip-version-check"], project)
    listed = subprocess.run([*pip, "config", "list"], stdout=subprocess.PIPE, text=True, check=False).stdout
    # The index with the newest file of a pinned version may be any of pip's, as for pip.
    options = ["--python", python, "--index-strategy", "unsafe-best-match", "--no-config"]
    constraints = ["--constraint", str(CONSTRAINTS), "--constraint", str(LOCK)]
    command = [str(tools / "uv"), "pip", "install", *options, *constraints, "--editable", project]
    # What a user set for uv itself comes first.
    return subprocess.run(command, cwd=ROOT, env={**places(listed), **os.environ}, check=False).returncode


def _install_by_pip(pip: list[str], project: str) -> int:
    """Let pip find out which packages are needed, install those with a hash, and then the project and torch."""
    resolve = [*pip, "install", "--dry-run", "--ignore-installed", "--quiet", "--constraint", str(CONSTRAINTS)]
    with tempfile.TemporaryDirectory() as folder:
        report, needed = Path(folder, "report.json"), Path(folder, "needed.txt")
        steps = [[*resolve, "--report", str(report), "--editable", project]]
        code = subprocess.run(steps[0], cwd=ROOT, check=False).returncode
        if code:
            return code
        names = [package["metadata"]["name"] for package in json.loads(report.read_text())["install"]]
        needed.write_text(locked(names, LOCK.read_text(encoding="utf-8")))
        hashed = [*pip, "install", "--quiet", "--no-deps", "--require-hashes", "--requirement", str(needed)]
        rest = [*pip, "install", "--quiet", "--constraint", str(CONSTRAINTS), "--editable", project]
        return next((code for step in (hashed, rest) if (code := subprocess.run(step, cwd=ROOT).returncode)), 0)


def main(arguments: list[str]) -> int:
    """Install; say what is done, and how long it took."""
    venv, extras = Path(arguments[0]), ",".join(arguments[1:])
    print(f"Installing phalanx with the extras {extras} into {venv} ...", flush=True)
    begun = time.monotonic()
    if not (venv / "uv").exists():
        create(venv)
    code = install(venv, f".[{extras}]")
    if code == 0:
        print(f"Installed in {time.monotonic() - begun:.0f} s.", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
