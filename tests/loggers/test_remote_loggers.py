"""MLFlowLogger, TrackioLogger and WandbLogger against the real libraries: a server on loopback, and local stores."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from ranks import run_script, started_script

HERE = Path(__file__).parent
# Importing MLflow takes seconds: once for all processes of these tests.
LIBRARIES = ("mlflow.server",)
# That may take a minute on a busy machine.
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "PHALANX_TEST_SERVICES" not in os.environ,
        reason="servers and services for a minute and a half: `make services` runs these tests",
    ),
]


def calling(module: str) -> str:
    """Return a script that calls ``main`` of a module of this folder, which may import the helpers of the tests."""
    return f"import sys\nsys.path[:0] = {[str(HERE), str(HERE.parent)]!r}\nimport {module}\n{module}.main()\n"


@contextmanager
def mlflow_server(directory: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start a server and yield its process and its port; it is ended at the end."""
    with started_script(HERE / "mlflow_server.py", str(directory), str(port), libraries=LIBRARIES) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("port "):
                break
        else:
            raise AssertionError("".join(lines))
        yield process, int(lines[-1].split()[1])


@pytest.fixture(scope="module")
def tracking_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that all tests of this module share."""
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as (_, port):
        yield f"http://127.0.0.1:{port}"


def variables(directory: Path) -> dict[str, str]:
    """Return an environment in which the libraries keep everything in a directory, and find no account."""
    temporary = directory / "temporary"
    temporary.mkdir(exist_ok=True)
    return {
        "HOME": str(directory),
        "TMPDIR": str(temporary),
        "TRACKIO_DIR": str(directory / "trackio"),
        "WANDB_SILENT": "true",
    }


def run_case(name: str, directory: Path, *arguments: str) -> str:
    case = (name, str(directory), *arguments)
    done = run_script(calling("remote_cases"), *case, env=variables(directory), libraries=LIBRARIES, timeout=100)
    assert done.returncode == 0, done.stdout
    return str(done.stdout)


@pytest.mark.parametrize("name", ["wandb_resumed", "wandb_given_id", "wandb_without_a_key", "trackio_records"])
def test_a_local_store(name: str, tmp_path: Path) -> None:
    run_case(name, tmp_path)


def test_a_program_that_ends_without_finalize_leaves_no_record_behind(tmp_path: Path) -> None:
    run_case("wandb_unfinished", tmp_path)
    run_case("wandb_unfinished_rows", tmp_path)


@pytest.mark.parametrize("name", ["mlflow_records", "mlflow_given_id", "mlflow_unreachable"])
def test_mlflow(name: str, tmp_path: Path, tracking_uri: str) -> None:
    run_case(name, tmp_path, tracking_uri)


def test_a_run_that_is_killed_twice_has_each_step_once_in_each_store(tmp_path: Path, tracking_uri: str) -> None:
    """Killed after step 5 of 12, which is past its newest checkpoint, and within step 10."""
    for kill_at, where, code in (("5", "between", -9), ("9", "within", -9), ("0", "-", 0)):
        given = (str(tmp_path), tracking_uri, kill_at, where)
        done = run_script(calling("remote_run"), *given, env=variables(tmp_path), libraries=LIBRARIES)
        assert done.returncode == code, done.stdout
    once = {("loss", step): 1 for step in range(12)} | {("val", step): 1 for step in (5, 11)}
    lines = [json.loads(line) for line in (tmp_path / "phalanx_logs/version_0/metrics.jsonl").open()]
    assert _points((line["step"], line["metrics"]) for line in lines if "metrics" in line) == once
    with sqlite3.connect(tmp_path / "trackio" / "digits.db") as store:
        rows = [(step, json.loads(values)) for step, values in store.execute("SELECT step, metrics FROM metrics")]
    assert _points(rows) == once
    for points in json.loads(run_case("points", tmp_path, tracking_uri).splitlines()[-1]):
        assert Counter(map(tuple, points)) == once


def _points(rows: Iterable[tuple[int, Mapping[str, float]]]) -> Counter[tuple[str, int]]:
    return Counter((name, step) for step, values in rows for name in ("loss", "val") if name in values)
