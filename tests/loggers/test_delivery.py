"""``Delivery``: each record reaches the store once and in order, whatever the store does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from messages import refuses
from ranks import run_script, wait_until

from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.metrics.json_lines import read_lines
from phalanx.loggers import MLFlowLogger, TrackioLogger, WandbLogger, delivery, remote
from phalanx.loggers.delivery import Delivery, Record, Refused, Store, metrics_of


class Memory(Store):
    """A store in memory that may be out of reach, and refuses negative steps."""

    batch_records = 3

    def __init__(self, has: int = 0) -> None:
        self.has = has
        self.reachable = True
        self.records: list[tuple[int, int]] = []
        self.statuses: list[str] = []
        self.attempts = 0
        self.hang = threading.Event()
        self.hang.set()

    def connect(self, records: Iterator[Record]) -> int:
        self._reach()
        return self.has

    def deliver(self, first: int, records: Sequence[Record]) -> None:
        self._reach()
        if any(record["step"] < 0 for record in records):
            raise Refused("negative")
        self.records += [(first + number, record["step"]) for number, record in enumerate(records)]

    def close(self, status: str) -> None:
        self.statuses.append(status)

    def _reach(self) -> None:
        self.attempts += 1
        self.hang.wait(30)
        if not self.reachable:
            raise ConnectionError("no route")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "_PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(delivery, "_LONGEST_PAUSE_SECONDS", 0.02)
    monkeypatch.setattr(delivery, "_FAILING_SECONDS", 0.2)


def filled(path: Path, steps: Sequence[int], say: Callable[[str], Any] = pytest.fail) -> Delivery:
    """Return a delivery with a point at each step, not yet started."""
    found = Delivery(path / "a.jsonl", "L", say, list)
    for step in steps:
        found.add_metrics({"loss": float(step)}, step)
    return found


def test_records_are_delivered_in_batches_and_the_store_is_closed(tmp_path: Path) -> None:
    given, store = filled(tmp_path, range(7)), Memory()
    given.start(store)
    assert given.finish("success", 30) == 0
    assert store.records == [(step, step) for step in range(7)]
    assert store.statuses == ["success"]


def test_a_store_that_comes_back_gets_everything_after_one_sentence(tmp_path: Path) -> None:
    notes: list[str] = []
    given, store = filled(tmp_path, range(2), notes.append), Memory()
    store.reachable = False
    given.start(store)
    wait_until(lambda: store.attempts > 3)
    given.add_metrics({"loss": 2.0}, 2)
    store.reachable = True
    wait_until(lambda: len(store.records) == 3)
    store.reachable = False
    given.add_metrics({"loss": 3.0}, 3)
    wait_until(lambda: store.attempts > 10)
    store.reachable = True
    assert given.finish("success", 30) == 0
    assert store.records == [(step, step) for step in range(4)]
    assert len(notes) == 1
    assert "L: the server cannot be reached (ConnectionError: no route)" in notes[0]


@pytest.mark.parametrize("hangs", [True, False])
def test_the_end_does_not_wait_for_a_store_out_of_reach(tmp_path: Path, hangs: bool) -> None:
    given, store = filled(tmp_path, range(2), lambda sentence: None), Memory()
    store.reachable = False
    if hangs:
        store.hang.clear()
    given.start(store)
    wait_until(lambda: store.attempts > 0)
    assert given.finish("success", 0.2) == 2
    assert store.statuses == []
    store.hang.set()


def test_a_refused_record_is_left_out_with_one_report(tmp_path: Path) -> None:
    notes: list[str] = []
    given, store = filled(tmp_path, [0, -1, 2, -3, 4], notes.append), Memory()
    given.start(store)
    assert given.finish("success", 30) == 0
    assert store.records == [(0, 0), (2, 2), (4, 4)]
    assert notes == ["L leaves out what was refused (negative)."]


def test_a_later_process_continues_where_the_store_is(tmp_path: Path) -> None:
    filled(tmp_path, range(4))
    for has, expected in ((3, [(3, 3)]), (4, []), (0, [(number, number) for number in range(4)])):
        store = Memory(has)
        given = filled(tmp_path, [])
        given.start(store)
        assert given.finish("success", 30) == 0
        assert store.records == expected


@pytest.mark.parametrize("known", [True, False])
def test_points_that_a_resumed_run_repeats_are_recorded_once(tmp_path: Path, known: bool) -> None:
    first = filled(tmp_path, range(2))
    position = first.size if known else None
    first.add_metrics({"loss": 2.0, "epoch": 0}, 2)
    first.add_media({"key": "image"}, 2)
    again = filled(tmp_path, [])
    again.resume(position, 2)
    again.add_metrics({"loss": 2.5, "epoch": 0}, 2)
    again.add_metrics({"val": 1.0, "epoch": 0}, 2)
    again.add_media({"key": "image"}, 2)
    again.add_metrics({"loss": float("inf")}, 3)
    records = [record for _, record in read_lines(again.path)]
    assert [(record["step"], record.get("metrics", record.get("media"))) for record in records] == [
        (0, {"loss": 0.0}),
        (1, {"loss": 1.0}),
        (2, {"loss": 2.0, "epoch": 0}),
        (2, {"key": "image"}),
        (2, {"val": 1.0, "epoch": 0}),
        (3, {"loss": "inf"}),
    ]
    assert metrics_of(records[-1]) == {"loss": float("inf")}


@pytest.mark.parametrize("cls", [MLFlowLogger, TrackioLogger, WandbLogger])
def test_a_missing_library_is_one_sentence_with_the_command(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "find_spec", lambda module: None)
    with refuses(ConfigurationError, cls.__name__, cls.LIBRARY):
        cls()


def test_a_directory_with_the_name_of_a_library_is_not_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B makes such a directory where a program runs."""

    class Other(WandbLogger):
        LIBRARY = "no_such_library"

    (tmp_path / "no_such_library").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with refuses(ConfigurationError, "no_such_library"):
        Other()


def test_wrong_arguments_are_refused() -> None:
    with refuses(ConfigurationError, "log_model='best'"):
        MLFlowLogger(log_model="best")
    with refuses(ConfigurationError, "tracking_url=", "'tracking_uri'"):
        MLFlowLogger(tracking_url="x")  # type: ignore[call-arg]


def test_other_ranks_than_0_have_an_experiment_without_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = WandbLogger(save_dir=tmp_path, offline=True)
    logger.experiment.log({"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_a_message_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "abcdef123456")
    error = ConnectionError("GET http://me:secret@host/x?key=abcdef123456 failed\nmore")
    assert delivery.first_line(error) == "GET http://***@host/x?key=*** failed"


IMPORTS = """
import sys
from types import SimpleNamespace
from phalanx import Trainer
from phalanx.callbacks import ProgressBar

loggers = Trainer(accelerator="cpu", logger=["csv", "jsonl", "tensorboard", "mlflow", "trackio", "wandb"]).loggers
ProgressBar().setup(SimpleNamespace(is_global_zero=True, verbose=True), None, "fit")
heavy = {"mlflow", "rich", "tensorboard", "trackio", "wandb"} & {*sys.modules}
print(*(type(logger).__name__.removesuffix("Logger") for logger in loggers), *heavy)
"""


def test_loggers_and_progress_outside_a_terminal_import_none_of_the_libraries() -> None:
    done = run_script(IMPORTS, is_new=True)
    assert done.stdout.splitlines()[-1] == "CSV JSONLines TensorBoard MLFlow Trackio Wandb", done.stdout
