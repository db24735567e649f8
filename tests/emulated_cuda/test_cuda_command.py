"""The command that runs tests on devices: its limit of time, and its summary of a run that was stopped."""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from cuda_machine import TESTS

SOURCE = """
import time
import pytest

def test_passes(measured):
    measured("bytes of a plan", 2048.0, "MiB")

@pytest.mark.skip(reason="there is no device")
def test_is_skipped(): ...

def test_fails():
    assert 1 + 1 == 3, "a planned failure"

def test_hangs():
    time.sleep(300)

def test_comes_after_it(): ...
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(TESTS / "cuda")
    return importlib.import_module("run_cuda_tests")


def test_a_group_is_stopped_at_its_limit_and_summarized(command: Any, tmp_path: Path) -> None:
    file = tmp_path / "test_planted.py"
    file.write_text(SOURCE)
    path = os.pathsep.join([str(TESTS), str(TESTS / "cuda")])
    environment = {**os.environ, "PYTHONPATH": path, "PHALANX_CUDA_RESULTS": str(tmp_path)}
    options = ["-p", "no:xdist", "--rootdir", tmp_path, "--confcutdir", tmp_path, "-c", os.devnull, file]
    group = {"name": "all", **command.run_group(options, environment, 12.0, tmp_path / "log")}
    results = command.cuda_summary.collect(tmp_path, {"torch": "2.11"}, [group])
    assert group["stopped"]
    assert results["counts"] == {"passed": 1, "skipped": 1, "failed": 1, "not reached": 2}
    assert not command.cuda_summary.is_good(results)
    text = command.cuda_summary.text_of(json.loads(json.dumps(results)))
    for expected in ("a planned failure", "1  there is no device", "test_hangs", "2,048 MiB", "2 not reached"):
        assert expected in text, text


def test_a_run_is_good_if_all_was_reached_and_none_failed(command: Any) -> None:
    group = {"exit code": 0}
    for counts, is_good in [
        ({"passed": 3, "skipped": 2, "not reached": 0}, True),
        ({"passed": 3, "not reached": 1}, False),
        ({"passed": 3, "failed": 1, "not reached": 0}, False),
        ({"skipped": 2, "not reached": 0}, False),
    ]:
        assert command.cuda_summary.is_good({"counts": counts, "groups": [group]}) is is_good
    assert not command.cuda_summary.is_good({"counts": {"passed": 3, "not reached": 0}, "groups": [{"exit code": 3}]})


def test_wheels_are_installed_where_the_package_is_missing_or_older(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(command.offline.subprocess, "run", lambda arguments, check: given.append(arguments))
    for name in (
        "missing_package-1.0-py3-none-any.whl",
        "pytest-999.0-py3-none-any.whl",
        "packaging-0.1-py3-none-any.whl",
        "other_package-1.0-cp27-cp27m-win32.whl",
    ):
        (tmp_path / name).touch()
    (tmp_path / "site").mkdir()
    command.offline.fill(tmp_path / "site", tmp_path)
    assert (tmp_path / "site" / "phalanx").samefile(command.ROOT)
    ((*_, site, first, second),) = given
    assert [Path(each).name.partition("-")[0] for each in (site, first, second)] == [
        "site",
        "missing_package",
        "pytest",
    ]
    assert {"--no-index", "--no-deps"} <= set(given[0])
