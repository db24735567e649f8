"""Loggers in a process that has their libraries imported. Arguments: CASE DIRECTORY [TRACKING_URI].

Each case is a function; its assertions fail the process. Files in the directory are the signals between a case and the
test that stops and starts the server.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from ranks import wait_until

from phalanx.framework.metrics.logger_fanout import LoggerFanout
from phalanx.loggers import Logger, MLFlowLogger, TrackioLogger, WandbLogger


def log_media(logger: Logger) -> None:
    """Record one item of each kind at step 3, in the only way that every logger has."""
    logger.log_image("samples", [torch.rand(3, 4, 5), torch.rand(4, 5)], 3, ["a", "b"])
    logger.log_table("rows", ["x", "y"], [[1, "one"], [2.5, None]], step=3)
    logger.log_text("note", "# title", 3)
    logger.log_histogram("weights", torch.arange(10.0), 3, bins=5)


def saved(directory: Path) -> Any:
    """Return what a logger reads of a ModelCheckpoint with one checkpoint."""
    path = directory / "step=3.ckpt"
    path.mkdir()
    (path / "weights").write_text("weights")
    return SimpleNamespace(best_k_models={}, best_model_path=str(path), last_model_path=str(path), save_top_k=1)


def wandb_files(directory: Path) -> list[Path]:
    """Return the files of W&B's runs below a directory, in their order."""
    return sorted(file for file in directory.rglob("run-*.wandb") if not file.parent.is_symlink())


def started(logger: Any, directory: Path) -> Any:
    """Return a logger of a run in a directory."""
    logger.attach(directory, "run", 0)
    return logger


def mlflow_records(directory: Path, uri: str) -> None:
    """Everything that MLFlowLogger records, and two runs of one name that stay apart."""
    logger = started(MLFlowLogger("cases", "mine", uri, tags={"team": "a"}, log_model=True, prefix="p"), directory)
    logger.log_hyperparams({"lr": 0.1, "model": {"depth": 2}, "api_key": "0123456789abcdef0123"})
    logger.log_metrics({"loss": float("nan"), "epoch": 0}, 3)
    logger.log_metrics({"val": 0.5, "epoch": 0}, 3)
    log_media(logger)
    logger.log_hyperparams({"lr": 0.2})
    logger.after_save_checkpoint(saved(directory))
    client, run_id = logger.experiment, logger.run_id
    logger.finalize("success")
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "mine"
    assert run.data.tags["team"] == "a"
    assert run.data.params == {"lr": "0.1", "model/depth": "2", "api_key": "***"}
    assert str(run.data.metrics.pop("p-loss")) == "nan"
    assert run.data.metrics == {"p-val": 0.5, "p-epoch": 0}
    assert len(client.get_metric_history(run_id, "p-epoch")) == 1
    names = {file.path for folder in ("media", "step=3.ckpt") for file in client.list_artifacts(run_id, folder)}
    assert names == {
        "media/p-rows_3.json", "media/p-note_3.txt", "media/p-weights_3.json", "step=3.ckpt/weights"
    }  # fmt: skip
    assert any("p-samples" in file.path for file in client.list_artifacts(run_id, "images"))
    other = started(MLFlowLogger("cases", "mine", uri), directory / "other")
    other_id = other.run_id
    assert other_id != run_id
    assert other.experiment_id == run.info.experiment_id
    other.finalize("failed")
    assert client.get_run(other_id).info.status == "FAILED"


def mlflow_unreachable(directory: Path, uri: str) -> None:
    """No server until the process has ended: the next one sends what was kept."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    logger = started(MLFlowLogger("late", tracking_uri=f"http://127.0.0.1:{port}"), directory)
    notes: list[str] = []
    fanout = LoggerFanout([logger], notes.append)
    fanout.log_metrics({"loss": 1.0}, 0)
    fanout.log_metrics({"loss": 2.0}, 1)
    marks = fanout.state_dicts()
    fanout.log_metrics({"loss": 3.0}, 2)
    fanout.finalize("success")
    assert ["cannot be reached" in note for note in notes].count(True) == 1, notes
    assert any("3 records were not sent" in note for note in notes), notes
    logger = started(MLFlowLogger("late", tracking_uri=uri), directory)
    logger.resume(2, marks[0]["state"])
    logger.log_metrics({"loss": 3.0}, 2)
    logger.log_metrics({"loss": 4.0}, 3)
    client, run_id = logger.experiment, logger.run_id
    logger.finalize("success")
    assert [(p.step, p.value) for p in client.get_metric_history(run_id, "loss")] == [(s, s + 1.0) for s in range(4)]


def wandb_resumed(directory: Path) -> None:
    """Offline, a run that is resumed twice, from a clean end and from lost rows, has each step once in its files."""
    from phalanx.loggers.wandb_files import history, records

    logger = started(WandbLogger(offline=True, project="cases", prefix="p", log_model=True), directory)
    logger.log_hyperparams({"lr": 0.1, "api_key": "0123456789abcdef0123"})
    logger.log_metrics({"loss": 0.0}, 0)
    state = logger.state_dict()
    logger.log_metrics({"loss": float("inf")}, 1)
    log_media(logger)
    logger.after_save_checkpoint(saved(directory))
    run = logger.experiment
    wait_until(lambda: run.config.as_dict() == {"lr": 0.1, "api_key": "***"})
    logger.finalize("success")
    # As if the process had been killed before W&B wrote this row.
    outbox = Path(logger.log_dir) / "wandb.jsonl"
    outbox.write_text(outbox.read_text() + '{"step":2,"time":1,"metrics":{"p-loss":2.0}}\n')
    again = started(WandbLogger(offline=True, project="cases", prefix="p"), directory)
    again.resume(1, state)
    again.log_metrics({"loss": 1.0}, 1)
    log_media(again)
    again.log_metrics({"loss": 2.0}, 2)
    again.log_metrics({"loss": 3.0}, 3)
    assert again.experiment.id == run.id
    again.finalize("success")
    files = wandb_files(directory / "cases")
    rows = [row for file in files for row in history(file)]
    steps = [row["trainer/global_step"] for row in rows if "p-loss" in row]
    assert steps == ["0", "1", "2", "3"], rows
    media = Counter(name.split("/")[0] for row in rows for name in row if name.endswith("/_type"))
    assert media == dict.fromkeys(("p-samples", "p-rows", "p-note", "p-weights"), 1), rows
    models: set[Any] = set()
    until = time.monotonic() + 30.0
    # A process of W&B writes the files.
    while not models and time.monotonic() < until:
        artifacts = [record.artifact for file in files for record in records(file) if record.HasField("artifact")]
        models = {(each.name, each.digest, *sorted(each.aliases)) for each in artifacts if each.type == "model"}
        time.sleep(0.1)
    assert [(name, aliases) for name, _, *aliases in models] == [(f"model-{run.id}", ["best", "latest"])], models


def wandb_given_id(directory: Path) -> None:
    """Two directories record in one run of W&B: each numbers its own records, and none is left out."""
    from phalanx.loggers.wandb_files import history

    for number in range(2):
        logger = WandbLogger(offline=True, project="cases", id="mine", dir=directory)
        started(logger, directory / str(number))
        for step in range(2):
            logger.log_metrics({"loss": 0.0}, 2 * number + step)
        logger.finalize("success")
    steps = [row["trainer/global_step"] for file in wandb_files(directory) for row in history(file) if "loss" in row]
    assert sorted(steps) == ["0", "1", "2", "3"], steps


def wandb_unfinished(directory: Path) -> None:
    """A program that ends without ``finalize``."""
    logger = started(WandbLogger(offline=True, project="cases"), directory)
    logger.log_metrics({"loss": 0.0}, 0)
    assert logger.experiment.offline
    logger.log_metrics({"loss": 1.0}, 1)


def wandb_unfinished_rows(directory: Path) -> None:
    """The rows of that program."""
    from phalanx.loggers.wandb_files import history

    assert [row["trainer/global_step"] for file in wandb_files(directory) for row in history(file)] == ["0", "1"]


def mlflow_given_id(directory: Path, uri: str) -> None:
    """Two directories record in one run of MLflow, and no record of the second is taken for one of the first."""
    logger = started(MLFlowLogger("shared", tracking_uri=uri), directory / "0")
    logger.log_metrics({"loss": 0.0}, 0)
    logger.log_metrics({"loss": 0.0}, 1)
    client, run_id = logger.experiment, logger.run_id
    logger.finalize("success")
    again = started(MLFlowLogger("shared", tracking_uri=uri, run_id=run_id), directory / "1")
    again.log_metrics({"loss": 0.0}, 2)
    again.finalize("success")
    assert [point.step for point in client.get_metric_history(run_id, "loss")] == [0, 1, 2]


def wandb_without_a_key(directory: Path) -> None:
    """A run that is to be online, without an API key, is kept offline with one sentence."""
    notes: list[str] = []
    logger = started(WandbLogger(project="cases"), directory)
    fanout = LoggerFanout([logger], notes.append)
    fanout.log_metrics({"loss": 0.0}, 0)
    assert logger.experiment.offline
    fanout.finalize("success")
    assert ["wandb sync" in note for note in notes if "W&B cannot be used" in note] == [True], notes


def trackio_records(directory: Path) -> None:
    """Everything that TrackioLogger records; a resumed run continues, also if the store lacks its newest rows."""
    from trackio import SQLiteStorage

    logger = started(TrackioLogger("cases", log_model=True), directory)
    logger.log_hyperparams({"lr": 0.1, "api_key": "0123456789abcdef0123"})
    logger.log_metrics({"loss": 0.0, "time": 1.0}, 0)
    state = logger.state_dict()
    logger.log_metrics({"loss": 1.0}, 1)
    log_media(logger)
    logger.after_save_checkpoint(saved(directory))
    run = logger.experiment
    logger.finalize("success")
    outbox = Path(logger.log_dir) / "trackio.jsonl"
    outbox.write_text(outbox.read_text() + '{"step":2,"time":1,"metrics":{"loss":2.0}}\n')
    again = started(TrackioLogger("cases"), directory)
    again.resume(1, state)
    again.log_metrics({"loss": 1.0}, 1)
    log_media(again)
    again.log_metrics({"loss": 2.0}, 2)
    again.log_metrics({"loss": 3.0}, 3)
    assert again.experiment.id == run.id
    again.finalize("success")
    logs = SQLiteStorage.get_logs("cases", run.name, run_id=run.id)
    assert [row["step"] for row in logs if "loss" in row] == [0, 1, 2, 3], logs
    media = Counter(name for row in logs if "loss" not in row for name in row if name not in ("step", "timestamp"))
    assert media == dict.fromkeys(("samples/0", "samples/1", "rows", "note", "weights"), 1), logs
    config = SQLiteStorage.get_run_config("cases", run.name, run_id=run.id)
    assert {name: config[name] for name in ("lr", "api_key")} == {"lr": 0.1, "api_key": "***"}
    assert len(SQLiteStorage.get_artifacts("cases")) == 1


def points(directory: Path, uri: str) -> None:
    """Print name and step of each point of the run that ``remote_run`` has ended, in MLflow and in files of W&B."""
    from mlflow import MlflowClient

    from phalanx.loggers.wandb_files import history

    names, client = ("loss", "val"), MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    of_mlflow = [(name, point.step) for name in names for point in client.get_metric_history(run.info.run_id, name)]
    rows = [row for file in wandb_files(directory / "digits" / "version_0") for row in history(file)]
    of_wandb = [(name, int(row["trainer/global_step"])) for row in rows for name in names if name in row]
    print(json.dumps([of_mlflow, of_wandb]))


def main() -> None:
    """Run the case that the arguments name."""
    globals()[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
