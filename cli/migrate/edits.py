"""Edits of a file's text, and remarks about lines that the user has to look at."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

LIGHTNING_PAGE = "docs/migrating-from-lightning.md"
ACCELERATE_PAGE = "docs/migrating-from-accelerate.md"
TRANSFORMERS_PAGE = "docs/migrating-from-hf-trainer.md"
COMPOSER_PAGE = "docs/migrating-from-composer.md"
SHARDED_PAGE = "docs/migrating-sharded.md"
_PAGE = re.compile(r"[,;:] see (docs/[\w-]+\.md(?:#[\w-]+)?)")


@dataclass(frozen=True)
class Edit:
    """The replacement of the bytes from ``start`` to ``end`` of a file."""

    start: int
    end: int
    text: str
    line: int


@dataclass(frozen=True, order=True)
class Left:
    """A line that was not translated, or that has another meaning: the reason, and the page to read."""

    line: int
    reason: str
    page: str


@dataclass
class Outcome:
    """The edits of one file and the lines that are left to the user."""

    edits: list[Edit] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    encoding: str = "utf-8"
    """That of the file."""

    def replace(self, span: tuple[int, int], text: str, line: int) -> None:
        self.edits.append(Edit(*span, text, line))

    def leave(self, line: int, reason: str, page: str) -> None:
        """Record a line once, with its first reason of these words; a page that the reason names comes first."""
        if named := _PAGE.search(reason):
            reason, page = reason[: named.start()] + reason[named.end() :], named[1]
        each = Left(line, reason, page)
        if each not in self.left:
            self.left.append(each)


def outermost(edits: Iterable[Edit]) -> list[Edit]:
    """Return edits in order of their position, without those inside another one, which replaces their text as well."""
    kept: list[Edit] = []
    for edit in sorted(dict.fromkeys(edits), key=lambda each: (each.start, -each.end)):
        if not kept or edit.start >= kept[-1].end:
            kept.append(edit)
    return kept


def line_after(source: bytes, edits: Iterable[Edit], line: int) -> int:
    """Return the line of the edited text at which a line of the source is, or that which has taken its place."""
    start = sum(map(len, source.splitlines(keepends=True)[: line - 1]))
    for edit in edits:
        if edit.end <= start:
            line += edit.text.count("\n") - source.count(b"\n", edit.start, edit.end)
        elif edit.start < start:
            line -= source.count(b"\n", edit.start, start)
    return line


def apply(source: bytes, edits: Iterable[Edit], encoding: str) -> bytes:
    """Return the source with edits that do not overlap."""
    parts, position = [], 0
    for edit in edits:
        parts += [source[position : edit.start], edit.text.encode(encoding)]
        position = edit.end
    return b"".join([*parts, source[position:]])
