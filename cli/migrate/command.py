"""``phalanx migrate``: prints the differences, applies them, and lists what is left."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator, Sequence

from ...framework.core.errors import CheckpointError, StorageError
from ...framework.core.wording import counted
from ...framework.system.console import encodable, printable
from ..terminal_text import say, say_json
from .files import Migrated, files_below, migrated, write_changed

SCHEMA = 1
# A file that is not Python is reported as a checkpoint that cannot be read is.
_UNREADABLE = CheckpointError.exit_code


def migrate_files(given: argparse.Namespace) -> int:
    """Print the differences of the given files, or apply them; return the exit code.

    Raises:
        ConfigurationError: a path does not exist.
    """
    found = [migrated(path) for path in files_below(given.files)]
    code = _UNREADABLE if any(each.error for each in found) else 0
    if given.write and not write_changed(found):
        code = StorageError.exit_code
    if given.json:
        say_json({"schema": SCHEMA, "written": given.write, "files": [_as_json(each) for each in found]})
    else:
        _show(found, given.write)
    return code


def _show(found: Sequence[Migrated], is_written: bool) -> None:
    for each in found:
        if not is_written:
            for line in difference(each):
                _print_source(line)
    for each in found:
        for one in each.left:
            say(f"{each.path}:{one.line}: {one.reason} See {one.page}.")
        if each.error:
            print(f"phalanx: {printable(f'{each.path}: {each.error}')}", file=sys.stderr)
    changed = [each for each in found if each.is_changed and not each.error]
    edits = counted(sum(len(each.outcome.edits) for each in changed), "replacement")
    left = sum(len(each.left) for each in found)
    verb = "written" if is_written else "to change"
    hint = "; --write applies them" if changed and not is_written else ""
    say(f"{counted(len(changed), 'file')} {verb}, {edits}; {counted(left, 'line')} left to you{hint}")


def difference(found: Migrated) -> Iterator[str]:
    """Yield the lines of a unified diff, each with its line break, as ``patch -p0`` reads them."""
    before, after = (re.findall("[^\n]*\n|[^\n]+", _text(each)) for each in (found.before, found.after))
    for line in difflib.unified_diff(before, after, fromfile=str(found.path), tofile=str(found.path)):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogateescape")


def _print_source(line: str) -> None:
    """Print a line of a diff: as it is into a pipe, with control characters escaped in a terminal."""
    if sys.stdout.isatty():
        line = "\t".join(map(printable, line.rstrip("\r\n").split("\t"))) + "\n"
    sys.stdout.write(encodable(line, sys.stdout))


def _as_json(each: Migrated) -> dict[str, object]:
    text = each.before
    replacements = [
        {
            "line": edit.line,
            "old": text[edit.start : edit.end].decode(each.outcome.encoding, "replace"),
            "new": edit.text,
        }
        for edit in each.outcome.edits
    ]
    left = [{"line": one.line, "reason": one.reason, "page": one.page} for one in each.left]
    return {
        "path": str(each.path),
        "changed": each.is_changed,
        "error": each.error or None,
        "replacements": replacements,
        "left": left,
    }
