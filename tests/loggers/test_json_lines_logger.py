"""``JSONLinesLogger``: the schema of its lines, and the file of a resumed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.loggers import JSONLinesLogger


def lines(logger: JSONLinesLogger) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in logger.path.read_text().splitlines()]
    assert all(isinstance(record.pop("time"), float) for record in records)
    return records


def test_a_line_for_each_record_and_no_secret(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path, prefix="p")
    assert not (tmp_path / logger.name).exists()
    logger.log_hyperparams({"lr": 0.1, "api_key": "0123456789abcdef0123"})
    logger.log_metrics({"loss": 0.5}, 49)
    logger.log_metrics({"loss": float("nan")})
    assert lines(logger) == [
        {"hparams": {"lr": 0.1, "api_key": "***"}},
        {"step": 49, "metrics": {"p-loss": 0.5}},
        {"step": 50, "metrics": {"p-loss": "nan"}},
    ]
    assert (Path(logger.log_dir) / "hparams.yaml").read_text() == 'lr: 0.1\napi_key: "***"\n'
    logger.finalize("success")


@pytest.mark.parametrize("known", [True, False])
def test_a_resumed_run_has_each_step_once(tmp_path: Path, known: bool) -> None:
    logger = JSONLinesLogger()
    logger.attach(tmp_path, "run", 0)
    for step in range(3):
        logger.log_metrics({"loss": float(step)}, step)
    state = logger.state_dict() if known else {}
    for step in range(3, 6):
        logger.log_metrics({"loss": -1.0}, step)
    again = JSONLinesLogger()
    again.attach(tmp_path, "run", 0)
    with again.path.open("a") as file:
        file.write('{"step":6,"ti')
    again.resume(3, state)
    for step in range(3, 7):
        again.log_metrics({"loss": float(step)}, step)
    again.finalize("success")
    assert lines(again) == [{"step": step, "metrics": {"loss": float(step)}} for step in range(7)]
    logger.finalize("success")


def test_the_file_of_another_run_in_a_chosen_directory_is_left_alone(tmp_path: Path) -> None:
    logger = JSONLinesLogger(tmp_path, "run", 0)
    logger.log_metrics({"loss": 1.0}, 5)
    logger.resume(0, {"directory": "elsewhere", "bytes": 0})
    logger.finalize("success")
    assert len(lines(logger)) == 1
