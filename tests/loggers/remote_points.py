"""Print the points of a run in the stores of MLflow and W&B, as JSON. Arguments: TRACKING_URI DIRECTORY.

In a process of its own, as W&B makes temporary directories when it is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mlflow import MlflowClient

from phalanx.loggers.wandb_files import history

NAMES = ("loss", "val")


def mlflow_points(uri: str) -> list[tuple[str, int]]:
    """Return name and step of each point of the only run of the experiment."""
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("digits")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    return [(name, point.step) for name in NAMES for point in client.get_metric_history(run.info.run_id, name)]


def wandb_points(directory: Path) -> list[tuple[str, int]]:
    """Return name and step of each point in the files of the run's processes."""
    files = [file for file in directory.rglob("run-*.wandb") if not file.parent.is_symlink()]
    rows = [row for file in files for row in history(file)]
    return [(name, int(row["trainer/global_step"])) for row in rows for name in NAMES if name in row]


print(json.dumps([mlflow_points(sys.argv[1]), wandb_points(Path(sys.argv[2]))]))
