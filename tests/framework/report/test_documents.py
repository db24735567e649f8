"""The report that is made from files: states, the reason of the end, damaged files, and the page."""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_runs import CONFIG, EVENTS, GONE, HOSTILE, ended, running, write_run
from messages import refuses

from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.report.charts import Scale, charts_of, ticks
from phalanx.framework.report.document import build_report
from phalanx.framework.report.finding import find_run, find_runs
from phalanx.framework.report.finish import amend_report
from phalanx.framework.report.overview import overview
from phalanx.framework.report.page import render_page
from phalanx.framework.report.run_files import RunFiles
from phalanx.framework.report.values import number_text, span_text
from phalanx.framework.report.verdicts import headline, shortened_command, with_checkpoint

WHERE = "rank 1 (pid 5) failed at step 3 (epoch 0, batch 3)"
STALL = """the run has stalled. What each rank was doing:
rank 1 (pid 7):
  a.py:3 f
rank 1 (pid 7) stalled: no heartbeat."""
TRACE = f"{WHERE}:\nTraceback (most recent call last):\n  File\nValueError: no"


@pytest.mark.parametrize(
    ("status", "report", "state", "sentence"),
    [
        (None, ended(0), "finished", "finished at step 20 after 2 h 4 min"),
        (None, ended(0, "patience is over"), "finished", "after 2 h 4 min, stopped early: patience is over"),
        (
            None,
            ended(1, TRACE),
            "failed",
            f"after 2 h 4 min, exit code 1: {WHERE}: ValueError: no",
        ),
        (None, ended(75, "SIGTERM came"), "preempted", "ended at step 20 after 2 h 4 min, exit code 75: SIGTERM came"),
        (None, ended(76, "silent"), "stalled", "exit code 76: silent"),
        (None, ended(130, "interrupted"), "interrupted", "exit code 130: interrupted"),
        (running, None, "running", "is training, at step 20 after 10 s"),
        (lambda: running(pid=GONE), None, "killed", "was killed at about step 20 after 10 s"),
        (lambda: running(host="elsewhere"), None, "running", "is training"),
        (lambda: running(host="elsewhere", age=3600.0), None, "silent", "no sign of life since step 20"),
        # A fit that has begun after the one whose report is there.
        (running, ended(0, began="x", ended="2001-01-01T00:00:00+00:00"), "running", "is training"),
    ],
)
def test_the_state_and_the_sentence(tmp_path: Path, status: Any, report: Any, state: str, sentence: str) -> None:
    found = build_report(RunFiles(write_run(tmp_path / "run", status=status and status(), report=report)))
    assert found["state"] == state
    assert sentence in found["why"]["sentence"]
    assert overview(tmp_path / "run")["state"] == state
    assert found["problems"] == []
    assert "<title>" in render_page(found)


@pytest.mark.parametrize("began", [1e9, 1e9 + 0.0004, 1e9 + 0.9999])
def test_the_verdict_on_a_fit_that_was_killed_at_once_is_its_own(tmp_path: Path, began: float) -> None:
    directory = write_run(tmp_path / "run", status=running(pid=GONE) | {"began": began, "updated": began, "step": 0})
    amend_report(directory, {"stopped": WHERE, "exit_code": 137}, {"optimizer_steps": 3})
    found = build_report(RunFiles(directory))
    assert (found["exit_code"], found["optimizer_steps"], found["why"]["step"]) == (137, 3, 3)
    assert WHERE in found["why"]["sentence"]


@pytest.mark.parametrize("own", ["", " --ckpt_path auto", " --ckpt_path=runs/last.ckpt --trainer.max_epochs 3"])
def test_the_checkpoint_of_a_command_is_given_once(own: str) -> None:
    command = with_checkpoint(f"phalanx fit config.yaml{own}", "a b")
    assert shlex.split(command).count("--ckpt_path") == 1
    assert command.endswith(" --ckpt_path 'a b'")
    assert ("--trainer.max_epochs 3" in command) == ("--trainer.max_epochs 3" in own)
    assert "last.ckpt" not in command


def test_a_killed_run_has_what_its_files_hold(tmp_path: Path) -> None:
    found = build_report(RunFiles(write_run(tmp_path / "run")))
    assert (found["optimizer_steps"], found["epochs"], found["exit_code"]) == (20, 1, None)
    assert found["metrics"] == {"train/loss": pytest.approx(0.2), "val/loss": 0.75}
    assert found["curves"]["val/loss"] == {"step": [19], "value": [0.75]}
    assert found["warnings"] == ["a warning"]
    assert found["why"]["lost_steps"] == 20
    assert found["why"]["lost"] == "all 20 steps are lost: there is no checkpoint"
    assert found["why"]["resume"] == "python train.py --lr 3   (from the beginning)"


@pytest.mark.parametrize("name", ["config.json", "status.json", "report.json", "history.jsonl", "ranks.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b"\xff\xfe\x00", b'{"resolved": 3, "metrics": [1], "updated": "x"}']
)
def test_damaged_files_are_reported_and_the_rest_is_shown(tmp_path: Path, name: str, content: bytes) -> None:
    directory = write_run(tmp_path / "run", report=ended(1, "failed"))
    (directory / name).write_bytes(content)
    found = build_report(RunFiles(directory))
    page = render_page(found)
    assert "<h1>" in page
    assert overview(directory)["path"] == str(directory)
    if content in (b"", b"{", b"[1]") and name != "history.jsonl" and name != "ranks.json":
        assert [problem.split()[0] for problem in found["problems"]] == [name]
    json.loads(json.dumps(found), parse_constant=lambda text: pytest.fail(text))


def test_a_document_of_wrong_types_is_shown(tmp_path: Path) -> None:
    odd = dict.fromkeys(CONFIG, 5) | {"checkpoint_directories": [3, None], "ckpt_path": []}
    strange = dict.fromkeys(running(), "text") | {"state": "running", "memory": 3, "metrics": 4}
    directory = write_run(tmp_path / "run", config=odd, status=strange, report=None)
    assert "<h1>" in render_page(build_report(RunFiles(directory)))
    overview(directory)


class Tags(HTMLParser):
    """The tags of a page, and the attributes that load something or run code."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.active: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.active += [each for each in attributes if each[0].startswith("on") or each[0] in ("src", "href", "srcset")]


def test_hostile_texts_are_escaped_and_nothing_is_loaded(tmp_path: Path) -> None:
    def spoiled(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                f"{name}{HOSTILE}" if name in ("lr", "max_epochs") else name: spoiled(one)
                for name, one in value.items()
            }
        if isinstance(value, list):
            return [*map(spoiled, value), HOSTILE]
        return HOSTILE if isinstance(value, str) else value

    events = [*EVENTS, {"step": 20, "time": 1020.0, "values": {HOSTILE: 1.0}}, {"note": HOSTILE}]
    directory = write_run(
        tmp_path / "a run", config=spoiled(CONFIG), report=ended(1, HOSTILE, traceback=HOSTILE), events=events
    )
    page = render_page(build_report(RunFiles(directory)))
    parser = Tags()
    parser.feed(page)
    assert parser.active == []
    assert parser.tags.count("script") == page.count("<script>") == 1
    assert "img" not in parser.tags
    assert not re.search(r"https?://|@import|url\(", page)


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    events = [*EVENTS, {"step": 20, "time": 1020.0, "values": {"train/loss": float("nan")}}]
    directory = write_run(tmp_path / "run", events=events, report=ended(1, metrics={"train/loss": float("inf")}))
    found = build_report(RunFiles(directory))
    assert found["curves"]["train/loss"]["value"][-1] is None
    assert found["metrics"] == {"train/loss": None}
    assert "<svg" in render_page(found)


def test_training_and_validation_share_a_chart() -> None:
    names = ["train/loss", "val/loss", "train_acc_epoch", "val_acc", "lr-SGD", "phalanx/memory_bytes", "test.f1"]
    curves = {name: {"step": [1, 2], "value": [1.0, 2.0]} for name in names}
    charts = {chart.title: [line.name for line in chart.lines] for chart in charts_of(curves)}
    assert charts["loss"] == ["train/loss", "val/loss"]
    assert sorted(charts["acc"]) == ["train_acc_epoch", "val_acc"]
    assert next(iter(charts)) == "loss"
    assert list(charts)[-1] == "memory in use"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]), (3.0, 3.0, [3.0]), (-5.0, 5.0, [-4.0, -2.0, 0.0, 2.0, 4.0])],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(Scale(low, high, 0.0, 100.0)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ""), ("one line", "one line"), ("first\nsecond", "first"),
        (TRACE, f"{WHERE}: ValueError: no"),
        ("Traceback (most recent call last):\n  File\nKeyError: 'a'\nnote", "KeyError: 'a'"),
        (STALL, "rank 1 (pid 7) stalled: no heartbeat."),
    ],
)  # fmt: skip
def test_the_headline_of_a_message(text: str | None, expected: str) -> None:
    assert headline(text) == expected


def test_commands_times_and_numbers_are_short() -> None:
    assert shortened_command("/usr/bin/python3 /home/u/a/train.py 'x y'", "/home/u") == "python a/train.py 'x y'"
    assert shortened_command("'broken") == "'broken"
    assert [span_text(seconds) for seconds in (0.0, 0.31, 41.2, 7452.0, 90_000.0)] == [
        "0 s", "0.3 s", "41 s", "2 h 4 min", "1 d 1 h",
    ]  # fmt: skip
    assert [span_text(seconds, 1) for seconds in (41.2, 7452.0, 90_000.0)] == ["41 s", "2 h", "1 d"]
    assert [number_text(value) for value in (None, 0.123456, 3.0, 12345.6)] == ["-", "0.1235", "3", "12,345.6"]


def test_runs_are_found_by_path_and_by_the_end_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with refuses(ConfigurationError, "'.'"):
        find_run(None)
    for name in ("gpt/version_0", "gpt/version_1", "deep/er/logs/version_7"):
        write_run(tmp_path / name, report=ended(0))
    (tmp_path / "gpt/version_1/checkpoints/version_9").mkdir(parents=True)
    assert len(find_runs(Path())) == 3
    assert find_run(None) == Path("deep/er/logs/version_7")
    for given in ("gpt/version_1", "1", "version_1", str(tmp_path / "gpt/version_1"), "gpt/version_1/report.json"):
        assert find_run(given).absolute() == tmp_path / "gpt/version_1", given
    assert find_run("gpt") == Path("gpt/version_1")
    for given in ("gtp/version_1", "verson_1"):
        with refuses(ConfigurationError, repr(given), "'gpt/version_1'"):
            find_run(given)


def test_the_folder_of_a_model_is_no_run(tmp_path: Path) -> None:
    model, kept = tmp_path / "model", tmp_path / "kept"
    for folder, content in ((model, {"model_type": "llama"}), (kept, {"versions": {"phalanx": "0.1.0"}})):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
    assert find_runs(tmp_path) == [kept]
