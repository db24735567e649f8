"""Tables in Markdown, printed and written into the pages that show them; modules that run in new processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Table:
    """The result of a measurement.

    Attributes:
        name: the name, under which a page may show it.
        head: the titles of the columns.
        rows: the cells; floats are shown with one decimal.
    """

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]

    def __str__(self) -> str:
        text = [[f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row] for row in self.rows]
        lines = [list(self.head), ["---", *["---:"] * (len(self.head) - 1)], *text]
        return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def write(table: Table, pages: Iterable[Path]) -> list[Path]:
    """Replace what pages have between ``<!-- NAME -->`` and ``<!-- end of the NAME -->``; return these pages."""
    begin, end = f"<!-- bench: {table.name} -->", f"<!-- end of bench: {table.name} -->"
    written = []
    for page in pages:
        before, found, rest = page.read_text().partition(begin)
        if found:
            _, closed, after = rest.partition(end)
            if not closed:
                raise ValueError(f"{page} has {begin} without {end}")
            page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}")
            written.append(page)
    return written


def results(
    module: str, *arguments: str, ranks: int = 0, seconds: float = 300, variables: Mapping[str, str] | None = None
) -> list[Any]:
    """Run a module; return the JSON of each line that it prints after ``RESULT``. A failure prints the end of stderr.

    Args:
        ranks: the number of ranks that torchrun starts; 0: one process without torchrun.
        seconds: the time limit.
        variables: environment variables to set.
    """
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks else []
    done = subprocess.run(
        [sys.executable, "-m", *torchrun, module, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
    )
    marked = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not marked:
        print(f"{module} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}", file=sys.stderr)
    return [json.loads(line) for line in marked]
