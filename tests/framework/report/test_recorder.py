"""``RunRecorder``: the files of a fit in progress, written by a thread that no disk can turn into a stop."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ranks import wait_until

from phalanx.framework.report import recorder as module
from phalanx.framework.report.event_log import read_events
from phalanx.framework.report.recorder import STATUS, RunRecorder, sparse
from phalanx.framework.report.series import RATE


def status(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / STATUS).read_text())
    return found


def test_the_state_the_values_and_the_end_are_recorded(tmp_path: Path) -> None:
    counters = {"step": 3}
    recorder = RunRecorder(tmp_path, lambda: dict(counters), {"step": 3, "attempt": 0})
    try:
        wait_until((tmp_path / STATUS).exists)
        assert (status(tmp_path)["state"], status(tmp_path)["step"]) == ("running", 3)
        counters["step"] = 9
        recorder.log({"loss": 0.5}, 8)
        recorder.note("a line")
        recorder.flush()
        assert status(tmp_path)["metrics"]["loss"] == 0.5
    finally:
        recorder.close(75, "stopped")
    last = status(tmp_path)
    assert (last["state"], last["exit_code"], last["message"], last["step"]) == ("ended", 75, "stopped", 9)
    events = read_events(tmp_path)
    assert events.notes == ["a line"]
    assert (events.attempts[0].reached, events.attempts[0].exit_code) == (9, 75)
    assert events.history.series[RATE].values[0] > 0
    assert "phalanx-recorder" not in {thread.name for thread in threading.enumerate()}


def test_speed_is_measured_in_steps_and_in_the_units_of_a_meter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PERIOD_SECONDS", 60.0)
    now = [100.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    state: dict[str, Any] = {"step": 4, "throughput": {"unit": "tokens", "count": 400.0}, "memory": {"used": 7}}
    recorder = RunRecorder(tmp_path, lambda: dict(state), {"step": 4})
    try:
        recorder.flush()
        now[0] += 2.0
        recorder.flush()
        state |= {"step": 8, "throughput": {"unit": "tokens", "count": 1000.0}}
        recorder.flush()
    finally:
        recorder.close(0, None)
    series = read_events(tmp_path).history.series
    assert (series[RATE].steps, series[RATE].values) == ([7], [2.0])
    assert series["phalanx/throughput tokens"].values == [300.0]
    assert series["phalanx/memory_bytes"].steps == [3, 7]


def test_the_rest_of_a_period_at_the_end_is_not_taken_for_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PERIOD_SECONDS", 60.0)
    now, state = [100.0], {"step": 0}
    monkeypatch.setattr(time, "time", lambda: now[0])
    recorder = RunRecorder(tmp_path, lambda: dict(state), {"step": 0})
    try:
        recorder.flush()
        now[0] += 50.0
        state["step"] = 100
        recorder.flush()
        now[0] += 20.0
        state["step"] = 101
    finally:
        recorder.close(0, None)
    rate = read_events(tmp_path).history.series[RATE]
    assert (rate.steps, rate.values) == ([99], [2.0])


def test_events_that_could_not_be_written_are_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PERIOD_SECONDS", 60.0)
    folder = tmp_path / "run"
    recorder = RunRecorder(folder, lambda: {"step": 1}, {"step": 0})
    try:
        recorder.log({"loss": 1.0}, 0)
        recorder.flush()
        folder.mkdir()
        recorder.log({"loss": 2.0}, 1)
    finally:
        recorder.close(0, None)
    events = read_events(folder)
    assert events.history.series["loss"].values == [1.0, 2.0]
    assert len(events.attempts) == 1


def test_many_rows_at_once_are_thinned_and_rare_ones_are_kept() -> None:
    rows: list[dict[str, Any]] = [{"step": step, "values": {"loss": 1.0}} for step in range(10_000)]
    rows[5_003] = {"step": 5_003, "values": {"val": 1.0}}
    rows[7_007] = {"note": "a line"}
    kept = sparse(rows)
    assert len(kept) <= 210
    assert all(rows[index] in kept for index in (0, 5_003, 7_007, 9_999))
    assert sparse(rows[:300]) == rows[:300]


def test_a_disk_that_never_answers_delays_only_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(module, "write_atomically", lambda *_: free.wait(30.0))
    recorder = RunRecorder(tmp_path, lambda: {"step": 1}, {"step": 0})
    try:
        for step in range(1000):
            recorder.log({"loss": 1.0}, step)
        recorder.close(0, None)
    finally:
        free.set()
        recorder._thread.join(20.0)
    assert not recorder._thread.is_alive()


def test_a_look_that_fails_leaves_the_rest(tmp_path: Path) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("dictionary changed size during iteration")

    recorder = RunRecorder(tmp_path, broken, {"step": 0})
    recorder.close(0, None)
    assert status(tmp_path)["state"] == "ended"
