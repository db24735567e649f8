"""``history.jsonl``: what a fit has logged, in a bounded size, also after kills and resumptions."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from phalanx.framework.report import event_log
from phalanx.framework.report.document import summarize_attempts
from phalanx.framework.report.event_log import HISTORY, EventWriter, read_events, record_end
from phalanx.framework.report.series import MOST_POINTS, MOST_SERIES, History, thinned


def test_a_series_is_bounded_and_keeps_its_spikes_and_its_ends() -> None:
    history = History()
    for step in range(50_000):
        history.add(step, float(step), {"loss": 1000.0 if step == 31_111 else math.sin(step / 500)})
    series = history.series["loss"]
    assert MOST_POINTS / 2 <= len(series.steps) <= MOST_POINTS
    assert max(series.values) == 1000.0
    assert series.steps[-1] == 49_999
    assert series.steps == sorted(set(series.steps))
    assert min(series.values) == pytest.approx(-1.0, abs=1e-4)


def test_a_value_that_is_not_finite_is_kept_beside_finite_ones() -> None:
    values = [1.0, math.nan, 3.0, 2.0, 5.0, math.inf, 4.0, 6.0, 7.0]
    assert [values[index] for index in thinned(values)] == [1.0, 3.0, 4.0, 6.0, 7.0]


def test_names_beyond_the_limit_are_counted() -> None:
    history = History()
    history.add(0, 0.0, {f"name{number}": 1.0 for number in range(MOST_SERIES + 3)})
    assert (len(history.series), len(history.left_out)) == (MOST_SERIES, 3)


def test_what_is_not_a_number_is_ignored() -> None:
    history = History()
    history.add(0, 0.0, {"a": "text", "b": True, "c": None, "d": 2, "e": 10**400})
    assert history.latest() == {"d": 2.0}


def test_a_resumed_fit_replaces_what_it_trains_again(tmp_path: Path) -> None:
    first = EventWriter(tmp_path)
    first.append([{"begin": {"time": 0.0, "step": 0}}])
    first.append([{"step": step, "time": float(step), "values": {"loss": 1.0, "gone": 5.0}} for step in range(10)])
    second = EventWriter(tmp_path)
    second.append([{"begin": {"time": 20.0, "step": 6, "attempt": 1, "checkpoint": "c"}}])
    second.append([{"step": step, "time": 20.0 + step, "values": {"loss": 2.0}} for step in range(6, 8)])
    events = read_events(tmp_path)
    assert events.history.series["loss"].steps == list(range(8))
    assert events.history.series["loss"].values == [1.0] * 6 + [2.0] * 2
    # A name that is not logged again has no values of steps that were undone.
    assert events.history.series["gone"].steps == list(range(6))


def test_the_time_lost_is_counted_by_cause(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    writer.append([{"begin": {"time": 0.0, "step": 0}}])
    writer.append([{"step": step, "time": float(step + 1), "values": {"loss": 1.0}} for step in range(10)])
    writer.append([{"begin": {"time": 13.0, "step": 6, "attempt": 1}}])
    writer.append(
        [{"step": 6, "time": 14.0, "values": {"loss": 1.0}}, {"end": {"time": 15.0, "step": 8, "exit_code": 75}}]
    )
    writer.append([{"begin": {"time": 115.0, "step": 8}}])
    found = summarize_attempts(read_events(tmp_path).attempts)
    assert (found["restarts"], found["repeated_steps"]) == (2, 4)
    # It was killed at second 10 with ten steps, and had the sixth at second 6; its ranks were back at second 13.
    assert (found["redone_seconds"], found["waited_seconds"], found["paused_seconds"]) == (4.0, 3.0, 100.0)
    assert found["goodput"] == pytest.approx(1 - 7 / 15, abs=1e-4)
    assert [each["to_step"] for each in found["attempts"]] == [10, 8, 8]
    assert [each["exit_code"] for each in found["attempts"]] == [None, 75, None]


def test_the_launcher_adds_how_far_a_killed_attempt_came_and_why_it_ended(tmp_path: Path) -> None:
    EventWriter(tmp_path).append([{"begin": {"time": 0.0, "step": 0}}])
    record_end(tmp_path, 20, 137, "rank 1 was killed at step 20")
    EventWriter(tmp_path).append([{"begin": {"time": 13.0, "step": 14, "attempt": 1, "checkpoint": "a/b.ckpt"}}])
    # It has recorded its end itself.
    EventWriter(tmp_path).append([{"end": {"time": 15.0, "step": 30, "exit_code": 75}}])
    record_end(tmp_path, 29, 1, "preempted")
    first, second = read_events(tmp_path).attempts
    assert (first.reached, first.exit_code) == (20, 137)
    assert (second.reached, second.ended, second.exit_code, second.message) == (30, 15.0, 75, "preempted")
    found = summarize_attempts([first, second])
    assert found["repeated_steps"] == 6
    assert found["went_on"] == ["rank 1 was killed at step 20; went on from b.ckpt, step 14, 6 steps trained again"]


def test_a_return_to_a_checkpoint_is_no_restart_and_a_later_failure_no_end_of_a_fit(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    writer.append([{"begin": {"time": 0.0, "step": 0}}, {"end": {"time": 1.0, "step": 14, "exit_code": 1}}])
    writer.append([{"begin": {"time": 1.0, "step": 12, "checkpoint": "a.ckpt", "rewind": True}}])
    writer.append([{"end": {"time": 2.0, "step": 19, "exit_code": 0}}])
    record_end(tmp_path, 19, 1, "ValueError: after the fit")
    found = summarize_attempts(read_events(tmp_path).attempts)
    assert (found["restarts"], found["went_on"]) == (0, [])
    assert [each["stopped"] for each in found["attempts"]] == [None, None]
    assert [each["exit_code"] for each in found["attempts"]] == [1, 0]


def test_a_file_that_a_kill_has_cut_off_is_read_and_continued(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path)
    writer.append([{"step": 0, "time": 0.0, "values": {"loss": 1.0}}])
    with (tmp_path / HISTORY).open("ab") as file:
        file.write(b'{"step": 1, "time": 1.0, "val')
    assert read_events(tmp_path).damaged == 0
    EventWriter(tmp_path).append([{"step": 2, "time": 2.0, "values": {"loss": 3.0}}])
    events = read_events(tmp_path)
    assert events.history.series["loss"].steps == [0, 2]
    assert events.damaged == 1


@pytest.mark.parametrize(
    "line",
    ["[]", "7", "{}", '{"values": 3}', '{"step": "x", "values": {"a": 1}}', '{"begin": {"step": 1e999}}', "\x00"],
)
def test_lines_of_another_kind_do_no_harm(tmp_path: Path, line: str) -> None:
    (tmp_path / HISTORY).write_text(f'{line}\n{{"step": 1, "time": 1.0, "values": {{"loss": 2.0}}}}\n')
    assert read_events(tmp_path).history.series["loss"].values == [2.0]


def test_the_file_is_written_again_when_thinned_values_take_most_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "_SPARE_VALUES", 100)
    writer = EventWriter(tmp_path)
    writer.append([{"begin": {"time": 0.0, "step": 0}}, {"note": "kept"}])
    for start in range(0, 12_000, 1_000):
        steps = range(start, start + 1_000)
        writer.append([{"step": step, "time": float(step), "values": {"loss": float(step)}} for step in steps])
    writer.append([{"begin": {"time": 12_000.0, "step": 11_500, "attempt": 1}}])
    lines = (tmp_path / HISTORY).read_text().splitlines()
    assert len(lines) < 2 * MOST_POINTS + 110
    events = read_events(tmp_path)
    assert events.notes == ["kept"]
    assert events.history.series["loss"].steps[0] == 0
    assert 11_400 < events.history.series["loss"].steps[-1] < 11_500
    assert [attempt.step for attempt in events.attempts] == [0, 11_500]
    assert all(json.loads(line) for line in lines)
