"""The methods for media: one signature on every logger, in the logger's thread, on rank 0 alone."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import Tensor

from phalanx import loggers
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.metrics import logger_fanout
from phalanx.framework.metrics.logger_fanout import LoggerFanout
from phalanx.framework.metrics.media import Histogram, Images, Media, Table, Text
from phalanx.loggers import CSVLogger, JSONLinesLogger, Logger, TensorBoardLogger

METHODS = ("log_image", "log_table", "log_text", "log_figure", "log_histogram")
LOGGERS = [name for name in loggers.__all__ if name.endswith("Logger")]


class Recorder(Logger):
    name = "recorder"
    version = 0

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.threads: set[str] = set()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.items.append(step)

    def log_media(self, media: Media) -> None:
        self.items.append(media)
        self.threads.add(threading.current_thread().name)


class Figure:
    """A figure of matplotlib, as far as loggers use one."""

    def savefig(self, file: Any, format: str) -> None:
        from PIL import Image

        Image.fromarray(np.zeros((2, 3), np.uint8)).save(file, format=format)


def log_all(logger: Logger, step: int | None = None) -> None:
    logger.log_image("image", [torch.ones(3, 4, 5), torch.zeros(4, 5)], step, ["a", "b"])
    logger.log_table("table", ["x"], [[1], [torch.tensor(2)]], step=step)
    logger.log_text("text", "# t", step)
    logger.log_figure("figure", Figure(), step)
    logger.log_histogram("histogram", torch.tensor([0.0, 1.0, 1.0, float("inf")]), step, bins=2)


@pytest.mark.parametrize("name", LOGGERS)
def test_each_logger_has_the_same_signatures(name: str) -> None:
    for method in METHODS:
        assert inspect.signature(getattr(getattr(loggers, name), method)) == inspect.signature(getattr(Logger, method))


def test_items_arrive_in_order_in_the_logger_s_thread() -> None:
    logger = Recorder()
    fanout = LoggerFanout([logger], pytest.fail)
    fanout.log_metrics({}, 4)
    log_all(logger)
    fanout.log_metrics({}, 5)
    logger.log_text("later", "x")
    fanout.finalize("success")
    first, image, table, text, figure, histogram, last, later = logger.items
    assert (first, last, later.step) == (4, 5, 5)
    assert [type(each) for each in (image, table, text, figure, histogram)] == [Images, Table, Text, Images, Histogram]
    assert {each.step for each in (image, table, text, figure, histogram)} == {4}
    assert (table.columns, table.rows) == (["x"], [[1], [2]])
    assert (histogram.counts, histogram.edges, histogram.total) == ([1, 2], [0.0, 0.5, 1.0], 2.0)
    assert logger.threads == {"phalanx-Recorder"}
    log_all(logger)
    assert logger.threads == {"phalanx-Recorder", threading.current_thread().name}


def test_a_queue_holds_a_limited_amount_of_media(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    logger = Recorder()
    fanout = LoggerFanout([logger], notes.append)
    monkeypatch.setattr(logger_fanout, "_MEDIA_BYTES", 30)
    for _ in range(3):
        logger.log_image("image", torch.zeros(4, 5))
    fanout.finalize("success")
    assert len(logger.items) == 1
    assert notes == ["Recorder was too slow: 2 calls were dropped."]


def test_other_ranks_than_0_record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    logger = Recorder()
    log_all(logger)
    assert logger.items == []


def test_csv_stores_files_and_says_so_once_for_each_kind(tmp_path: Path) -> None:
    notes: list[str] = []
    logger = CSVLogger(tmp_path)
    fanout = LoggerFanout([logger], notes.append)
    for step in (1, 2):
        log_all(logger, step)
    fanout.finalize("success")
    assert [note.split(":")[0] for note in notes] == [
        f"CSVLogger shows no {kind}" for kind in ("images", "tables", "texts", "histograms")
    ]
    names = {path.name for path in (Path(logger.log_dir) / "media").iterdir()}
    assert {"image_1_0.png", "table_2.csv", "text_1.txt", "figure_2.png", "histogram_1.json"} <= names
    assert len(names) == 12


def test_json_lines_name_the_files(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path)
    log_all(logger, 3)
    logger.finalize("success")
    records = [json.loads(line) for line in logger.path.read_text().splitlines()]
    assert [(each["step"], each["media"]["kind"]) for each in records] == [
        (3, kind) for kind in ("images", "tables", "texts", "images", "histograms")
    ]
    assert records[0]["media"] == {
        "key": "image", "kind": "images", "files": ["media/image_3_0.png", "media/image_3_1.png"],
        "captions": ["a", "b"],
    }  # fmt: skip
    assert all((logger.path.parent / file).exists() for each in records for file in each["media"]["files"])


def test_tensorboard_shows_every_kind(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, prefix="p")
    log_all(logger, 3)
    logger.finalize("success")
    read = EventAccumulator(logger.log_dir)
    read.Reload()
    tags = read.Tags()
    assert set(tags["images"]) == {"p-image/0", "p-image/1", "p-figure"}
    assert [(each.step, each.width, each.height) for each in read.Images("p-image/0")] == [(3, 5, 4)]
    assert set(tags["tensors"]) == {
        f"p-{name}/text_summary" for name in ("table", "text", "image/caption/0", "image/caption/1")
    }
    value = read.Histograms("p-histogram")[0].histogram_value
    assert (value.num, value.sum, value.bucket, value.bucket_limit) == (3, 2.0, [1.0, 2.0], [0.5, 1.0])


@pytest.mark.parametrize(
    "call",
    [
        lambda logger: logger.log_image("a", torch.zeros(2, 2), caption=["a", "b"]),
        lambda logger: logger.log_table("a", ["x", "y"], [[1]]),
        lambda logger: logger.log_table("a"),
        lambda logger: logger.log_text("a", ["x"]),
        lambda logger: logger.log_figure("a", 3),
        lambda logger: logger.log_histogram("a", [1.0], bins=0),
    ],
)
def test_a_wrong_argument_is_refused_in_the_call(call: Any) -> None:
    logger = Recorder()
    with pytest.raises(ConfigurationError):
        call(logger)
    assert logger.items == []


def test_an_empty_histogram_and_one_value() -> None:
    logger = Recorder()
    logger.log_histogram("none", [float("nan")], bins=2)
    logger.log_histogram("one", [3.0, 3.0], bins=2)
    assert [each.counts for each in logger.items] == [[0, 0], [0, 2]]
    assert logger.items[1].edges == [2.5, 3.0, 3.5]


def sharded_histograms(root: str) -> tuple[list[float], list[int], Tensor]:
    """Return the sums and the numbers of values of histograms of a sharded weight, and the full weight."""
    recorder = Recorder()

    class Watched(Regressor):
        def on_train_end(self) -> None:
            recorder.log_histogram("weight", next(self.parameters()), step=1)

    module = Watched()
    silent_trainer(strategy="fsdp", devices=2, max_epochs=1, logger=recorder, default_root_dir=root).fit(
        module, loader(8)
    )
    histograms = [each for each in recorder.items if isinstance(each, Histogram)]
    return (
        [each.total for each in histograms],
        [sum(each.counts) for each in histograms],
        next(module.parameters()).detach(),
    )


def test_a_histogram_of_a_sharded_weight_is_that_of_the_full_one(tmp_path: Path) -> None:
    (totals, counts, weight), (others, *_) = run_on_ranks(2, sharded_histograms, str(tmp_path))
    assert totals == [pytest.approx(float(weight.double().sum()), rel=1e-9)]
    assert counts == [weight.numel()]
    assert others == []
