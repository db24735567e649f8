"""Write requirements.lock: the packages of the `dev` extra with the versions of constraints.txt and their hashes.

    python .ci/lock.py UV

`UV` is the command `uv`. The lock serves every Python version and processor of Linux that phalanx supports. torch, and
what its builds for CUDA bring along, are not in it: the builds of one version come from different indices, with
different hashes.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from audit import OF_TORCH, normalized

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
_TITLE = "# Written by `make lock` from pyproject.toml and constraints.txt. torch is not in it, as its builds differ.\n"
_OPTIONS = "--universal --python-version=3.10 --extra=dev --extra=bench --constraints=constraints.txt --generate-hashes"
_LAYOUT = "--no-header --no-annotate --quiet --no-config"
_ELSEWHERE = re.compile(r"sys_platform == '(?!linux')")


def entries(lock: str) -> list[str]:
    """Return the entries of a lock: each is a line with the version and the lines of its hashes."""
    return re.findall(r"(?m)^[\w.-]+==.*\n(?:[ ]+--hash.*\n)*", lock)


def belongs(entry: str) -> bool:
    """Whether an entry is installed on Linux with every build of torch."""
    first = entry.splitlines()[0]
    name = normalized(first.partition("==")[0])
    # An alternative such as Windows, or an old version of Python anywhere, includes Linux.
    on_linux = any(_ELSEWHERE.search(alternative) is None for alternative in first.split(" or "))
    return name != "torch" and OF_TORCH.fullmatch(name) is None and on_linux


def main(arguments: list[str]) -> int:
    """Write the lock; return the exit code of uv."""
    command = [arguments[0], "pip", "compile", "pyproject.toml", *_OPTIONS.split(), *_LAYOUT.split()]
    made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if made.returncode == 0:
        kept = [entry for entry in entries(made.stdout) if belongs(entry)]
        LOCK.write_text(_TITLE + "".join(kept), encoding="utf-8")
        print(f"{LOCK.name}: {len(kept)} packages.")
    return made.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
