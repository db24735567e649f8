"""Files that a command line names: found, rewritten, and replaced as a whole."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...framework.core.errors import ConfigurationError, StorageError
from ...framework.system.atomic_files import new_file, write_synced
from .edits import Left, Outcome, apply, line_after
from .names import Missing, Target, counterpart, other_framework_of
from .script import migrate_script

_SCRIPTS, _CONFIGS = (".py",), (".yaml", ".yml")
_NOT_SEARCHED = {"__pycache__", "node_modules", "site-packages", "build", "dist"}
# `class_path` of LightningCLI, and `_target_` of Hydra.
_CLASS = re.compile(rb"""^[^#\n]*?(?<![\w.])(?:class_path|_target_)[ \t]*:[ \t]*["']?(?P<path>[A-Za-z_][\w.]*)""", re.M)


@dataclass
class Migrated:
    """One file before and after.

    Attributes:
        path: as it was given, or below a directory that was given.
        before: its bytes.
        after: its bytes with all edits.
        outcome: the edits and the lines that are left.
        error: why the file could not be read or written; empty if it could.
        is_written: whether the file has the text after by now.
    """

    path: Path
    before: bytes = b""
    after: bytes = b""
    outcome: Outcome = field(default_factory=Outcome)
    error: str = ""
    is_written: bool = False

    @property
    def is_changed(self) -> bool:
        return self.before != self.after

    @property
    def left(self) -> list[Left]:
        """The lines that are left, by their numbers in the file as it is now."""
        if not self.is_written:
            return self.outcome.left
        edits = self.outcome.edits
        return [replace(each, line=line_after(self.before, edits, each.line)) for each in self.outcome.left]


def files_below(given: Iterable[str]) -> list[Path]:
    """Return the files that were given, and the scripts and YAML files below directories, each once.

    Raises:
        ConfigurationError: a path does not exist, or is a file of another kind.
    """
    found: dict[Path, None] = {}
    for text in given:
        path = Path(text)
        if path.is_dir():
            found.update(dict.fromkeys(_below(path)))
        elif not path.exists():
            raise ConfigurationError(f"{text!r} does not exist: give Python scripts, YAML files or directories.")
        elif path.suffix not in (*_SCRIPTS, *_CONFIGS):
            raise ConfigurationError(f"{text!r} is neither a Python script nor a YAML file.")
        else:
            found[path] = None
    return list(found)


def _below(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory):
        folders[:] = sorted(name for name in folders if name not in _NOT_SEARCHED and not name.startswith("."))
        for name in sorted(names):
            if name.endswith((*_SCRIPTS, *_CONFIGS)):
                yield Path(folder, name)


def migrated(path: Path) -> Migrated:
    """Read a file and return it with its edits. An error is in the result, so that the other files are read."""
    found = Migrated(path)
    try:
        found.before = found.after = path.read_bytes()
        if path.suffix in _CONFIGS:
            found.outcome = migrate_yaml(found.before)
        else:
            found.outcome = migrate_script(found.before, path.name == "__init__.py")
        found.after = apply(found.before, found.outcome.edits, found.outcome.encoding)
    except (OSError, ValueError) as error:
        found.error = str(error) if not isinstance(error, OSError) else f"reading {path} failed: {error.strerror}"
    return found


def migrate_yaml(text: bytes) -> Outcome:
    """Return the edits of a configuration in YAML: class names of Lightning alone, so that comments and layout stay."""
    outcome = Outcome()
    for match in _CLASS.finditer(text):
        path = match["path"].decode()
        if (framework := other_framework_of(path)) is None:
            continue
        target, line = counterpart(path), text.count(b"\n", 0, match.start("path")) + 1
        if isinstance(target, Target) and not target.is_module:
            outcome.replace(match.span("path"), target.dotted, line)
        elif isinstance(target, Missing):
            outcome.leave(line, target.reason, framework.page)
    return outcome


def write(found: Migrated) -> None:
    """Replace a file by its edited text: complete, with its permissions, or not at all.

    Raises:
        StorageError: the file is read-only, or its directory cannot be written.
    """
    target = found.path.resolve()
    mode = target.stat().st_mode
    if not mode & 0o222 or not os.access(target, os.W_OK):
        raise StorageError(f"{found.path} is read-only; nothing was changed in it.")
    with new_file(target, needed_bytes=len(found.after)) as temporary:
        write_synced(temporary, found.after)
        os.chmod(temporary, mode & 0o7777)


def write_changed(found: Iterable[Migrated]) -> bool:
    """Write the files that change, each also if another one cannot be; return whether all could be written."""
    is_complete = True
    for each in found:
        if each.is_changed:
            try:
                write(each)
                each.is_written = True
            except StorageError as error:
                each.error, is_complete = str(error), False
    return is_complete
