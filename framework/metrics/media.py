"""Media of a run: images, tables, texts and histograms in a form that every logger can show or store."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .image_files import png

# The memory that a cell of a table is counted with.
_CELL_BYTES = 64


@dataclass(frozen=True)
class Media:
    """A media item under a name, at an optimizer step. It shares no memory with what the user passed.

    Attributes:
        kind: the word for it, in the plural, in messages.
        suffix: that of its files.
    """

    key: str
    step: int
    kind: ClassVar[str] = "media"
    suffix: ClassVar[str] = ""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes, roughly."""
        return 0

    def contents(self) -> list[bytes]:
        """Return the content of each of its files."""
        raise NotImplementedError

    def write(self, directory: Path) -> list[Path]:
        """Write its files below a directory and return their paths. A file of the same name and step is replaced."""
        stem = directory.joinpath(*map(_file_name, self.key.split("/")))
        stem.parent.mkdir(parents=True, exist_ok=True)
        contents = self.contents()
        paths = []
        for number, content in enumerate(contents):
            which = f"_{number}" if len(contents) > 1 else ""
            path = stem.with_name(f"{stem.name}_{self.step}{which}{self.suffix}")
            path.write_bytes(content)
            paths.append(path)
        return paths


@dataclass(frozen=True)
class Images(Media):
    """Images, each an array of uint8 with shape (height, width) or (height, width, channels), or a PNG file's bytes."""

    pictures: Sequence[Any]
    captions: Sequence[str]
    kind: ClassVar[str] = "images"
    suffix: ClassVar[str] = ".png"

    @property
    def num_bytes(self) -> int:
        return sum(len(each) if isinstance(each, bytes) else int(each.nbytes) for each in self.pictures)

    def contents(self) -> list[bytes]:
        return [each if isinstance(each, bytes) else png(each) for each in self.pictures]


@dataclass(frozen=True)
class Table(Media):
    """A table with named columns; a cell is a number, a text, a bool or None."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    kind: ClassVar[str] = "tables"
    suffix: ClassVar[str] = ".csv"

    @property
    def num_bytes(self) -> int:
        return _CELL_BYTES * len(self.columns) * len(self.rows)

    def contents(self) -> list[bytes]:
        lines = io.StringIO(newline="")
        csv.writer(lines, lineterminator="\n").writerows([self.columns, *self.rows])
        return [lines.getvalue().encode()]


@dataclass(frozen=True)
class Text(Media):
    """A text, which may be Markdown."""

    text: str
    kind: ClassVar[str] = "texts"
    suffix: ClassVar[str] = ".txt"

    @property
    def num_bytes(self) -> int:
        return len(self.text)

    def contents(self) -> list[bytes]:
        return [self.text.encode()]


@dataclass(frozen=True)
class Histogram(Media):
    """The number of finite values in each bin; bin ``i`` is from ``edges[i]`` to ``edges[i + 1]``."""

    counts: Sequence[int]
    edges: Sequence[float]
    total: float
    """The sum of the values."""
    squares: float
    """The sum of their squares."""
    kind: ClassVar[str] = "histograms"
    suffix: ClassVar[str] = ".json"

    def contents(self) -> list[bytes]:
        return [json.dumps({"counts": list(self.counts), "edges": list(self.edges)}).encode()]


def _file_name(part: str) -> str:
    name = re.sub(r"[^\w.-]", "_", part)
    return name if name.strip(".") else "_"
