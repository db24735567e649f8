"""The trials of Ray Tune on docs/sweeps.md, on a Ray of this machine: `make services` runs it."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
from ranks import run_command

import phalanx

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "PHALANX_TEST_SERVICES" not in os.environ,
        reason="a local Ray takes half a minute to start: `make services` runs these tests",
    ),
]
PAGE = Path(phalanx.__file__).parent / "docs" / "sweeps.md"
START = """
import ray

ray.init(num_cpus=2, include_dashboard=False)
"""


def test_the_page_on_sweeps_finds_the_best_value_by_ray_tune(tmp_path: Path) -> None:
    own, of_ray = re.findall(r"(?ms)^```python[^\n]*\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))
    (tmp_path / "tuned.py").write_text(
        f"{own.partition('study = ')[0]}\n{START}\n{of_ray}\nprint('best', best.config)\n"
    )
    # The path of a socket must be short.
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    variables = {
        "RAY_TMPDIR": str(folder), "HOME": str(folder), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0", "PYTHONPATH": os.pathsep.join(map(str, sys.path)),
    }  # fmt: skip
    try:
        done = run_command([sys.executable, "tuned.py"], tmp_path, variables, timeout=240.0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stdout
    assert "best {'lr': 0.1}" in done.stdout
