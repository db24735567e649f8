"""``LoggerFanout``: what one logger does to the training and to the others."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
from ranks import wait_until
from torch import nn

from phalanx.framework.metrics import logger_fanout
from phalanx.framework.metrics.logger_fanout import LoggerFanout
from phalanx.loggers import Logger


class Recorder(Logger):
    name = "recorder"
    version = 0

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.calls.append(("metrics", dict(metrics), step))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.calls.append(("hyperparams", dict(params)))

    def finalize(self, status: str) -> None:
        self.calls.append(("finalize", status))


class Failing(Recorder):
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        raise OSError("disk full")


class Hanging(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.entered.set()
        self.go_on.wait(30)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("phalanx-")]


def test_all_loggers_get_everything_in_order_and_the_threads_end() -> None:
    first, second = Recorder(), Recorder()
    fanout = LoggerFanout([first, second], pytest.fail)
    metrics = {"loss": 1.0}
    fanout.log_hyperparams({"lr": 0.1})
    fanout.log_metrics(metrics, 1)
    metrics["loss"] = 2.0
    fanout.log_metrics(metrics, 2)
    fanout.save()
    fanout.finalize("success")
    assert first.calls == second.calls
    assert first.calls == [
        ("hyperparams", {"lr": 0.1}),
        ("metrics", {"loss": 1.0}, 1),
        ("metrics", {"loss": 2.0}, 2),
        ("finalize", "success"),
    ]
    assert not our_threads()


def test_a_logger_that_keeps_raising_is_reported_and_left_out() -> None:
    notes: list[str] = []
    good, bad = Recorder(), Failing()
    fanout = LoggerFanout([bad, good], notes.append)
    for step in range(5):
        fanout.log_metrics({}, step)
    fanout.finalize("success")
    fanout.log_metrics({}, 5)
    fanout.finalize("success")
    assert notes == [
        "Failing.log_metrics failed (OSError: disk full): this call is lost; the logger remains in use.",
        "Failing failed (OSError: disk full): it is no longer used; training and the other loggers continue.",
    ]
    assert fanout.loggers == [good]
    assert [call[2] for call in good.calls if call[0] == "metrics"] == list(range(6))
    assert bad.calls == [("finalize", "failed")]
    assert not our_threads()


def test_a_logger_that_hangs_neither_stops_the_steps_nor_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger_fanout, "_PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(Hanging, "close_seconds", 0.2)
    monkeypatch.setattr(logger_fanout, "_CAPACITY", 10)
    notes: list[str] = []
    good, hanging = Recorder(), Hanging()
    fanout = LoggerFanout([hanging, good], notes.append)
    fanout.log_metrics({}, 0)
    assert hanging.entered.wait(10)
    for step in range(1, 9):
        fanout.log_metrics({}, step)
    for _ in range(5):
        fanout._writers[0].put("save", ())
    fanout.finalize("success")
    hanging.go_on.set()
    wait_until(lambda: not our_threads())
    assert [call[2] for call in good.calls if call[0] == "metrics"] == list(range(9))
    assert good.calls[-1] == ("finalize", "success")
    assert [note.split(" (")[0].split(" to ")[0] for note in notes] == [
        "Waiting for Hanging",
        "Hanging was too slow: 4 calls were dropped.",
        "Hanging failed",
    ]
    assert "it did not finish in 0 s, and 10 calls were dropped" in notes[-1]
    assert fanout.loggers == [good]


def test_the_graph_is_recorded_in_the_calling_thread() -> None:
    seen: list[str] = []

    class Graph(Recorder):
        def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
            seen.append(threading.current_thread().name)

    class NoGraph(Recorder):
        def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
            raise RuntimeError("cannot trace")

    notes: list[str] = []
    fanout = LoggerFanout([Graph(), NoGraph()], notes.append)
    fanout.log_graph(nn.Linear(1, 1))
    assert seen == [threading.current_thread().name]
    assert len(notes) == 1
    assert notes[0].startswith("NoGraph.log_graph failed (RuntimeError: cannot trace): this call is lost")
    assert len(fanout.loggers) == 2
    fanout.finalize("success")


def test_a_call_that_fails_now_and_then_costs_that_call() -> None:
    class Unsteady(Recorder):
        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
            if step % 3:
                raise OSError("no answer")
            super().log_metrics(metrics, step)

    notes: list[str] = []
    logger = Unsteady()
    fanout = LoggerFanout([logger], notes.append)
    for step in range(10):
        fanout.log_metrics({}, step)
    fanout.finalize("success")
    assert [call[2] for call in logger.calls if call[0] == "metrics"] == [0, 3, 6, 9]
    assert len(notes) == 1
    assert fanout.loggers == [logger]
