"""The benchmarks: every side trains the same, marks become numbers, and tables reach the pages that show them."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent

# The checkout is the package, so its benchmarks are found in it.
growth: Any = import_module("phalanx.benchmarks.growth")
step: Any = import_module("phalanx.benchmarks.step")
tables: Any = import_module("phalanx.benchmarks.tables")

SAME = """
from benchmarks.sides import SIDES, ends_as_raw, missing
from benchmarks.task import Job

for side in SIDES:
    if not missing(side):
        ends_as_raw(side, Job(1))
        ends_as_raw(side, Job(1, everyday=True))
        print(side)
for side in ("raw", "phalanx", "Lightning"):
    ends_as_raw(side, Job(1, values=2))
"""


def test_every_side_ends_with_the_weights_of_the_raw_loop() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAME], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert {"raw", "phalanx", "phalanx Fabric", "Fabric", "Accelerate", "Lightning"} <= set(done.stdout.splitlines())


def test_a_round_has_the_steps_within_epochs_and_what_follows_an_epoch() -> None:
    marks = step.Marks()
    # Three epochs of ten steps of 2 µs, with 1 ms after each; the first two steps are slower, and left out.
    now = 0
    for index in range(30):
        marks._wall.append(now)
        marks._cpu.append(now // 2)
        now += 2_000 + (9_000 if index < 2 else 0) + (1_000_000 if (index + 1) % 10 == 0 else 0)
    found = marks.round(10)
    assert (found.least, found.wall, found.cpu, found.cpu_mean) == (2, 2, 1, 1)
    assert (found.epoch_end, found.epoch_end_cpu) == (1000, 500)


def test_overheads_are_differences_within_a_round() -> None:
    walls = {"raw": [10.0, 20.0, 30.0], "Fabric": [14.0, 24.0, 34.0], "phalanx": [12.0, 22.0, 90.0]}
    found = {side: [step.Round(wall, wall, wall, wall) for wall in each] for side, each in walls.items()}
    assert step.over(found, "phalanx", "raw", lambda each: each.wall) == 2
    assert step._share(found, "phalanx", lambda each: each.wall) == "50 %"


def test_calls_of_phalanx_are_told_from_those_of_others() -> None:
    rows = {row[0]: row[1:] for row in step.calls(("raw", "phalanx Fabric")).rows}
    assert rows["raw"][1] == "0"
    every, own = map(int, rows["phalanx Fabric"])
    # Those of torch are in both; phalanx leaves a few of them out.
    assert 0 < own < every - int(rows["raw"][0]) / 2


def test_a_table_is_written_between_its_marks(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    page.write_text("before\n<!-- bench: x -->\nold\n<!-- end of bench: x -->\nafter\n")
    other.write_text("nothing\n")
    table = tables.Table("x", ["", "µs"], [["raw", 1.23], ["phalanx", ""]])
    assert tables.write(table, [page, other]) == [page]
    rows = "| | µs |\n| --- | ---: |\n| raw | 1.2 |\n| phalanx | |"
    assert page.read_text() == f"before\n<!-- bench: x -->\n\n{rows}\n\n<!-- end of bench: x -->\nafter\n"
    page.write_text("<!-- bench: x -->")
    with pytest.raises(ValueError, match="without"):
        tables.write(table, [page])


def test_pages_show_tables_that_are_measured() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for part in page.read_text().split("<!-- bench: ")[1:]:
            name = part.partition(" -->")[0]
            assert f'"{name}"' in sources or "by ranks under" in name, f"{page}: {name}"
            assert f"<!-- end of bench: {name} -->" in part, f"{page}: {name}"


def test_what_many_ranks_would_send_is_computed() -> None:
    checkpoint, _ = growth.beyond((4, 16), 1)
    found = {title: cells for title, *cells in checkpoint.rows}
    assert found["files"] == ["8", "32"]
    assert found["tensor pieces"] == ["192", "768"]
