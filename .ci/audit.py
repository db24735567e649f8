"""Compare the installed packages with constraints.txt, and their files with the hashes recorded at installation.

    python .ci/audit.py [constraints.txt]

Run by the interpreter of the environment; needs no network, and so knows no vulnerabilities that were published later
than the list below. The recorded hashes detect files that were changed after the installation, not a package that was
malicious when it was installed. Prints a line for each finding; the exit code is 1 if there is any.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
MALICIOUS = {"lightning": {"2.6.2", "2.6.3"}, "pytorch-lightning": {"2.6.2", "2.6.3"}}
# They come with the interpreter, or are this checkout.
OWN = {"pip", "phalanx"}
# What a build of torch for CUDA brings along; each has the version that torch requires.
OF_TORCH = re.compile(r"nvidia-.*|cuda-.*|triton")


def normalized(name: str) -> str:
    """Return the name of a package as an index writes it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(constraints: str) -> dict[str, set[str]]:
    """Return the versions of each package that a constraints file allows, on any interpreter."""
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"(?m)^([\w.-]+)==([^\s;]+)", constraints):
        found.setdefault(normalized(name), set()).add(version)
    return found


def findings(package: Distribution, allowed: dict[str, set[str]]) -> Iterator[str]:
    """Yield a sentence for each finding about one package."""
    name, version = normalized(package.metadata["Name"]), package.version
    if version in MALICIOUS.get(name, ()):
        yield f"{name} {version} is malicious: uninstall it, and replace every secret this machine could read."
    if name not in OWN and not OF_TORCH.fullmatch(name):
        # A build of torch appends its kind: 2.13.0+cpu.
        wanted = allowed.get(name)
        if wanted is None:
            yield f"{name} {version} is not in the constraints."
        elif version.partition("+")[0] not in wanted:
            yield f"{name} {version} is installed, and the constraints name {' or '.join(sorted(wanted))}."
    # Not ``package.files``, which leaves out missing files from Python 3.12 on.
    for file, recorded, *_ in csv.reader((package.read_text("RECORD") or "").splitlines()):
        if not recorded or name in OWN:
            continue
        kind, _, expected = recorded.partition("=")
        try:
            digest = hashlib.new(kind, Path(str(package.locate_file(file))).read_bytes()).digest()
        except OSError as error:
            yield f"{name}: {file} cannot be read ({error.strerror})."
            continue
        if base64.urlsafe_b64encode(digest).decode().rstrip("=") != expected:
            yield f"{name}: {file} was changed after the installation."


def main(arguments: list[str]) -> int:
    """Print all findings; return the exit code."""
    allowed = pinned(Path(arguments[0] if arguments else ROOT / "constraints.txt").read_text(encoding="utf-8"))
    packages = sorted(distributions(), key=lambda package: normalized(package.metadata["Name"]))
    found = [sentence for package in packages for sentence in findings(package, allowed)]
    print("\n".join(found) or f"{len(packages)} packages: versions as in the constraints, files as recorded.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
