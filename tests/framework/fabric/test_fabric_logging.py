"""Loggers of a Fabric write in threads: one that fails or hangs does not disturb the loop."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from phalanx import Fabric
from phalanx.loggers import CSVLogger, Logger


class Failing(Logger):
    """Cannot write."""

    name, version = "failing", ""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        raise OSError("disk full")

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        pass


class Hanging(Failing):
    """Does not return from a call until it is released."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.released = threading.Event()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.entered.set()
        self.released.wait(30)


def test_a_logger_that_fails_does_not_stop_the_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fabric = Fabric(accelerator="cpu", loggers=[Failing(), CSVLogger(tmp_path, name="run", version=0)])
    for step in range(5):
        fabric.log("loss", 0.5, step)
    fabric.end_training()
    assert len((tmp_path / "run" / "version_0" / "metrics.csv").read_text().splitlines()) == 6
    assert "Failing.log_metrics failed (OSError: disk full)" in capsys.readouterr().err


def test_a_logger_that_hangs_does_not_stop_the_loop() -> None:
    hanging = Hanging()
    fabric = Fabric(accelerator="cpu", loggers=hanging)
    fabric.log("loss", 0.5, 0)
    assert hanging.entered.wait(10)
    fabric.log("loss", 0.5, 1)
    hanging.released.set()
    fabric.end_training()


def test_a_logger_that_is_added_later_gets_what_follows(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", loggers=CSVLogger(tmp_path, name="first", version=0))
    fabric.log("loss", 0.5, 0)
    fabric.loggers.append(CSVLogger(tmp_path, name="second", version=0))
    fabric.log("loss", 0.25, 1)
    fabric.end_training()
    lines = [
        len((tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines()) for name in ("first", "second")
    ]
    assert lines == [3, 2]
