"""The sections and pages of the site, read from the tables of ``docs/index.md``.

A page is listed in one place: as a row ``| [Title](page.md) | contents |`` below a heading of that file. The navigation
of the site, the order of ``llms-full.txt`` and the entries of ``llms.txt`` follow it.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# The beginning of a page whose code or table is wide: its content takes the place of its table of contents.
WIDE = "---\nhide: [toc]\n---\n\n"

_ROW = re.compile(r"^\| \[(?P<title>[^\]]+)\]\((?P<path>[^)]+)\) \| (?P<contents>.+?) \|$")


class Entry(NamedTuple):
    """A page of the site."""

    title: str
    path: str
    """The address of its source, relative to ``docs/``."""
    contents: str
    """The contents in one phrase, as Markdown."""


class Section(NamedTuple):
    """A section of the navigation."""

    title: str
    entries: list[Entry]


def read_sections(index: str) -> list[Section]:
    """Return the sections of the text of ``index.md``, those without a table left out."""
    sections: list[Section] = []
    for line in index.splitlines():
        if line.startswith("## "):
            sections.append(Section(line.removeprefix("## ").strip(), []))
        elif sections and (row := _ROW.match(line)):
            sections[-1].entries.append(Entry(**row.groupdict()))
    return [section for section in sections if section.entries]


def table_row(entry: Entry) -> str:
    """Return the row of a table of ``index.md`` that lists a page."""
    return f"| [{entry.title}]({entry.path}) | {entry.contents} |"
