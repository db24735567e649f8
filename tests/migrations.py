"""Scripts of other frameworks before and after ``phalanx migrate``, for its tests."""

from __future__ import annotations

import textwrap
from typing import NamedTuple

from phalanx.cli.migrate.edits import apply
from phalanx.cli.migrate.script import migrate_script


class Rewritten(NamedTuple):
    """A script after the rewriting: its text, and the line and reason of each part that is left."""

    text: str
    left: list[tuple[int, str]]


def rewritten(before: str, is_package_file: bool = False) -> Rewritten:
    """Return a script as ``phalanx migrate`` leaves it; a second rewriting must change nothing."""
    source = textwrap.dedent(before).encode()
    outcome = migrate_script(source, is_package_file)
    after = apply(source, outcome.edits)
    compile(after, "after", "exec")
    assert migrate_script(after, is_package_file).edits == []
    return Rewritten(after.decode(), [(each.line, each.reason) for each in outcome.left])


def assert_left_again(found: Rewritten) -> None:
    """Assert that a script whose imports are phalanx's by now still has what was left in it."""
    again = rewritten(found.text)
    assert again.text == found.text
    assert [reason for _, reason in again.left] == [reason for _, reason in found.left]


def assert_becomes(before: str, after: str, is_package_file: bool = False) -> None:
    """Assert that a script is rewritten completely, to this text."""
    found = rewritten(before, is_package_file)
    assert found.text == textwrap.dedent(after)
    assert found.left == []
