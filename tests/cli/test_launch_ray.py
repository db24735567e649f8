"""Jobs on a local Ray cluster: the job that ``phalanx launch --on ray`` writes, and trials of Ray Tune.

`make services` runs these tests.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray_cluster
from ranks import run_command, started_command

import phalanx

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "PHALANX_TEST_SERVICES" not in os.environ,
        reason="a local Ray takes half a minute to start: `make services` runs these tests",
    ),
]

# Ends with the code that is given for this turn.
TURN = """
import os, pathlib, sys
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
turn = len(list(folder.glob(f"rank_{rank}_*")))
(folder / f"rank_{rank}_of_{os.environ['WORLD_SIZE']}_turn_{turn}").touch()
sys.exit(int(sys.argv[2 + turn]))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """The variables with which a driver finds a cluster of two nodes that all tests of this module share."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    variables = {
        "RAY_TMPDIR": str(folder),
        "HOME": str(folder),
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default 15: beside other processes that use all cores, its workers would get a twentieth of one.
        "RAY_worker_niceness": "0",
    }
    try:
        with started_command([sys.executable, str(ray_cluster.__file__)], folder, variables) as process:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("address "):
                    break
            else:
                raise AssertionError("".join(lines))
            yield {**variables, "RAY_ADDRESS": lines[-1].split()[1]}
            process.send_signal(signal.SIGTERM)
            process.wait(60.0)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(("codes", "turns"), [(["75", "0"], [75, 0]), (["78", "0"], [78])])
def test_a_ray_job_that_was_preempted_runs_again(
    tmp_path: Path, cluster: dict[str, str], codes: list[str], turns: list[int]
) -> None:
    (tmp_path / "train.py").write_text(TURN)
    options = ["-n", "1", "--nodes", "2", "--on", "ray", "--cpu", "-o", "job.py"]
    command = [sys.executable, "-m", "phalanx", "launch", *options, "train.py", str(tmp_path), *codes]
    written = run_command(command, tmp_path)
    assert written.returncode == 0, written.stdout
    done = run_command([sys.executable, "job.py"], tmp_path, cluster, timeout=240.0)
    assert done.returncode == turns[-1], done.stdout
    started = sorted(path.name for path in tmp_path.glob("rank_*"))
    assert started == [f"rank_{rank}_of_2_turn_{turn}" for rank in range(2) for turn in range(len(turns))], done.stdout
    assert done.stdout.count("the run is started again, from its newest checkpoint") == len(turns) - 1


PAGE = Path(phalanx.__file__).parent / "docs" / "sweeps.md"


def test_the_page_on_sweeps_finds_the_best_value_by_ray_tune(tmp_path: Path, cluster: dict[str, str]) -> None:
    own, of_ray = re.findall(r"(?ms)^```python[^\n]*\n(.*?)^```$", PAGE.read_text(encoding="utf-8"))
    parts = own.partition("study = ")[0], "import ray", "ray.init()", of_ray, "print('best', best.config)"
    (tmp_path / "tuned.py").write_text("\n".join(parts))
    variables = {**cluster, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    done = run_command([sys.executable, "tuned.py"], tmp_path, variables, timeout=240.0)
    assert done.returncode == 0, done.stdout
    assert "best {'lr': 0.1}" in done.stdout
