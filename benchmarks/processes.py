"""Runs a benchmark in new processes, and reads the results that they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})},
    )
    found = [
        json.loads(line.removeprefix("RESULT ")) for line in done.stdout.splitlines() if line.startswith("RESULT ")
    ]
    if not found:
        print(f"{module} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return found
