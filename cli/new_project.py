"""``phalanx new``: a folder with a script that trains at once, its configuration and its test."""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ..framework.core.errors import ConfigurationError, StorageError
from ..framework.core.package_paths import PACKAGE_ROOT
from .terminal_text import say, say_json

TEMPLATES = PACKAGE_ROOT / "cli" / "templates"
# Neither hidden nor an option, and a name that each tool and each file system accepts.
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def create_project(given: argparse.Namespace) -> int:
    """Copy a template into a new folder; return the exit code. The files are copied as they are."""
    folder = Path(given.name)
    if not _NAME.fullmatch(folder.name):
        raise ConfigurationError(
            f"{given.name!r} is not a name for a project: begin with a letter, and use letters, digits, '-' and '_'."
        )
    template = TEMPLATES / given.kind
    files = sorted(file.name for file in template.iterdir() if file.is_file())
    try:
        folder.mkdir(parents=True)
        for name in files:
            shutil.copyfile(template / name, folder / name)
    except FileExistsError:
        raise ConfigurationError(f"{given.name!r} exists already: give a name that is not taken.") from None
    except OSError as error:
        raise StorageError(f"{given.name!r} cannot be created: {error.strerror or error}.") from error
    lacks = install_command(template, files)
    if given.json:
        say_json({"schema": 1, "path": str(folder), "kind": given.kind, "files": files, "missing": lacks})
        return 0
    say(f"created {folder}: {', '.join(files)}")
    say(f"  cd {folder}")
    if lacks:
        say(f"  {lacks}    for what it needs")
    say("  python train.py    to train")
    if "config.yaml" in files:
        say("  phalanx fit config.yaml    to train by the configuration")
    say("  pytest    to run its test")
    return 0


def install_command(folder: Path, files: Sequence[str]) -> str | None:
    """Return the command that installs what files of a project import and are read by; None if nothing is missing."""
    texts = {name: (folder / name).read_text(encoding="utf-8") for name in files}
    needed = [
        ("sklearn", "scikit-learn", any("sklearn" in text for text in texts.values())),
        ("pytest", "pytest", any(name.startswith("test_") for name in texts)),
        ("jsonargparse", "'jsonargparse[signatures]>=4.49'", any(name.endswith(".yaml") for name in texts)),
    ]
    missing = [package for module, package, is_needed in needed if is_needed and find_spec(module) is None]
    return f"pip install {' '.join(missing)}" if missing else None
