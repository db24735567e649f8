"""Print the points of the only run of an experiment in MLflow, as JSON: ``mlflow_points.py TRACKING_URI``."""

from __future__ import annotations

import json
import sys

from mlflow import MlflowClient

client = MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name("digits")
assert experiment is not None
(run,) = client.search_runs([experiment.experiment_id])
assert run.info.status == "FINISHED"
points = [(name, point.step) for name in ("loss", "val") for point in client.get_metric_history(run.info.run_id, name)]
assert len(points) == len(set(points)), points
print(json.dumps(points))
