"""The pytest plugin of ``make cuda``: records each outcome and each measured value as it comes.

Both are lines of JSON in the folder that ``PHALANX_CUDA_RESULTS`` names: a run that was stopped leaves a record.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Measured = Callable[[str, float, str], None]
RESULTS = "PHALANX_CUDA_RESULTS"
# The end of a failure's text, which has the error itself.
_LONGEST = 12_000


def append(name: str, entry: dict[str, Any]) -> None:
    """Add a line to a file of the results; several processes may do so at once."""
    line = json.dumps(entry) + "\n"
    with (Path(os.environ[RESULTS]) / name).open("a") as file:
        file.write(line)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks."""
    config.addinivalue_line("markers", "alone: measures time or memory, so no other test runs beside it")
    config.addinivalue_line("markers", "deepspeed: uses DeepSpeed, whose ops are compiled while other tests run")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of libraries that are not installed."""
    for item in items:
        for library, is_needed in (
            ("deepspeed", item.get_closest_marker("deepspeed")),
            ("torchao", "fp8" in item.name),
        ):
            if is_needed and importlib.util.find_spec(library) is None:
                item.add_marker(pytest.mark.skip(reason=f"{library} is not installed: see `make wheels`"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Record which tests are to run: once, not by each process."""
    worker = getattr(session.config, "workerinput", {"workerid": "gw0"})["workerid"]
    if worker == "gw0":
        for item in session.items:
            append("collected.jsonl", {"id": item.nodeid})


class Recorder:
    """Records outcomes, in the process that all reports arrive in."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the result of a test's call, and those of its fixtures unless they passed."""
        if report.when != "call" and report.passed:
            return
        is_skipped = report.skipped and isinstance(report.longrepr, tuple)
        text = str(report.longrepr[2]).removeprefix("Skipped: ") if is_skipped else str(report.longrepr or "")  # type: ignore[index]
        entry = {"id": report.nodeid, "outcome": report.outcome, "when": report.when, "seconds": report.duration}
        append("outcomes.jsonl", {**entry, "text": text[-_LONGEST:]})


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Record outcomes where the reports of all processes arrive."""
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Recorder())


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Measured:
    """Record a value: a name, the value, and its unit."""

    def note(name: str, value: float, unit: str) -> None:
        append("measured.jsonl", {"id": request.node.nodeid, "name": name, "value": value, "unit": unit})

    return note
