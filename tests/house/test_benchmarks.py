"""The benchmarks run: those of them that take seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import phalanx

ROOT = Path(phalanx.__file__).parent


def test_what_many_ranks_would_tell_is_computed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from benchmarks.growth import beyond; beyond((4, 16), 1)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = {cells[1]: cells[2:4] for line in done.stdout.splitlines() if len(cells := line.split("|")) > 3}
    found = {name.strip(): [cell.strip() for cell in cells] for name, cells in rows.items()}
    assert found["files"] == ["8", "32"]
    assert found["pieces of tensors"] == ["192", "768"]
