"""``MLFlowLogger``: records a run in MLflow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..framework.metrics.hparams_text import flattened
from ..framework.system.environment import library_variable, set_library_default
from .delivery import Record, Refused, Store, first_line, metrics_of
from .remote import Identity, RemoteLogger

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Limits of MLflow for one request, and for the text of a parameter.
_MOST_METRICS = 1000
_MOST_PARAMS = 100
_MOST_CHARACTERS = 6000
# Answers to a request that would be the same later.
_FINAL = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE"}
_FINAL |= {"RESOURCE_ALREADY_EXISTS", "RESOURCE_DOES_NOT_EXIST"}
_TAG = "phalanx.run"
# The tag of how many records the run has, after the identity that they are of.
_SENT = "phalanx.sent"
_STATUS = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}


class MLFlowLogger(RemoteLogger):
    """Record metrics, hyperparameters, media and checkpoints in a run of MLflow.

    ``experiment`` is MLflow's ``MlflowClient``, and ``run_id`` the run that it is used with. Reading them waits until
    the server responds. While the server cannot be reached, records are kept in ``mlflow.jsonl`` in the run's directory
    and sent later. A run that resumes continues the same run of MLflow. Images are shown by MLflow; tables, texts and
    histograms are stored as artifacts in ``media/``. Parameters of MLflow cannot be changed: other values of the same
    names are left out, with a message.

    Args:
        experiment_name: the experiment's name, created if it does not exist.
        run_name: the run's name; default: one that MLflow invents.
        tracking_uri: the server; default: the variable ``MLFLOW_TRACKING_URI``, or a database in ``save_dir``.
        tags: tags of the run.
        save_dir: root directory of the files; default: the run's.
        log_model: ``"all"`` records every checkpoint when it is saved, True those that are left at the end.
        checkpoint_path_prefix: a directory for checkpoints among the run's artifacts.
        prefix: prepended to the key of every metric, with ``-`` between.
        artifact_location: where a new experiment keeps artifacts; default: where the server says.
        run_id: a run to continue.
        synchronous: has no effect, as records are sent in a thread; for compatibility.
    """

    LIBRARY = "mlflow"
    REQUIREMENT = "mlflow>=3.5"

    def __init__(
        self,
        experiment_name: str = "phalanx_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        log_model: bool | str = False,
        checkpoint_path_prefix: str = "",
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        super().__init__(save_dir, experiment_name, run_id, prefix, log_model)
        self._tracking_uri = tracking_uri or library_variable("MLFLOW_TRACKING_URI")
        self._options: dict[str, Any] = {
            "experiment_name": experiment_name,
            "run_name": run_name,
            "tags": dict(tags or {}),
            "artifact_location": artifact_location,
            "checkpoints": checkpoint_path_prefix,
            "run_id": run_id,
        }

    @property
    def experiment(self) -> MlflowClient:
        return cast("MlflowClient", self._connected().client)

    @property
    def run_id(self) -> str:
        """The id of the run of MLflow; waits until it exists."""
        return cast("str", self._connected().run_id)

    @property
    def experiment_id(self) -> str:
        """The id of the experiment of MLflow; waits until it exists."""
        return cast("str", self._connected().experiment_id)

    def _new_store(self, identity: Identity) -> Store:
        uri = self._tracking_uri
        if uri is None:
            root = Path(self.save_dir).absolute()
            uri = f"sqlite:///{root / 'mlflow.db'}"
            self._options["artifact_location"] = self._options["artifact_location"] or str(root / "mlartifacts")
        return MLFlowStore(uri, identity, **self._options)


class MLFlowStore(Store):
    """A run of MLflow. A point is identified by name, step, value and time, so sending one again has no effect."""

    batch_records = 200

    def __init__(
        self,
        uri: str,
        identity: Identity,
        experiment_name: str,
        run_name: str | None,
        tags: dict[str, Any],
        artifact_location: str | None,
        checkpoints: str,
        run_id: str | None,
    ) -> None:
        self._uri = uri
        self._identity = identity
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tags = {**tags, _TAG: identity.key}
        self._artifact_location = artifact_location
        self._checkpoints = checkpoints.strip("/")
        self.run_id = run_id or identity.get("run_id") or ""
        self.experiment_id = ""
        # For each name the newest point: a value that is recorded twice at a step, such as the epoch, is one point.
        self._newest: dict[str, tuple[int, float]] = {}

    def connect(self, records: Iterator[Record]) -> int:
        # MLflow would try for minutes by itself; the sender tries again, and knows when the run ends.
        set_library_default("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        from mlflow import MlflowClient

        self.client = MlflowClient(self._uri)
        if self.run_id:
            self.client.update_run(self.run_id, status="RUNNING")
        else:
            self.run_id = self._find_run(self._find_experiment())
        opened = self.client.get_run(self.run_id)
        self.experiment_id = opened.info.experiment_id
        self._identity.set("run_id", self.run_id)
        key, _, text = opened.data.tags.get(_SENT, "").partition(" ")
        sent = int(text) if key == self._identity.key else 0
        for number, record in enumerate(records):
            if number < sent and "metrics" in record:
                self._points(record)
        return sent

    def deliver(self, first: int, records: Sequence[Record]) -> None:
        from mlflow.exceptions import MlflowException

        known = dict(self._newest)
        try:
            points = [point for record in records if "metrics" in record for point in self._points(record)]
            others = [record for record in records if "metrics" not in record]
            sent = f"{self._identity.key} {first + len(records)}"
            self._log_points(points, None if others else sent)
            for record in others:
                self._log_other(record)
            if others:
                # The next records say it again.
                with contextlib.suppress(Exception):
                    self.client.set_tag(self.run_id, _SENT, sent)
        except MlflowException as error:
            self._newest = known
            if error.error_code in _FINAL:
                raise Refused(first_line(error)) from error
            raise
        except BaseException:
            self._newest = known
            raise

    def close(self, status: str) -> None:
        self.client.set_terminated(self.run_id, _STATUS.get(status, "FINISHED"))

    def _find_experiment(self) -> str:
        found = self.client.get_experiment_by_name(self._experiment_name)
        if found is not None:
            return str(found.experiment_id)
        return str(self.client.create_experiment(self._experiment_name, artifact_location=self._artifact_location))

    def _find_run(self, experiment: str) -> str:
        """Return the run of this identity. A killed process may have created it without writing down its id."""
        query = f"tags.`{_TAG}` = '{self._identity.key}'"
        found = self.client.search_runs([experiment], query, max_results=1)
        run = found[0] if found else self.client.create_run(experiment, tags=self._tags, run_name=self._run_name)
        return str(run.info.run_id)

    def _points(self, record: Record) -> list[tuple[str, float, int, int]]:
        """Return name, value, time in milliseconds and step of the points of a record that are not yet known."""
        step, milliseconds = record["step"], int(record["time"] * 1000)
        points = []
        for name, value in metrics_of(record).items():
            if self._newest.get(name) != (step, value):
                self._newest[name] = (step, value)
                points.append((name, value, milliseconds, step))
        return points

    def _log_points(self, points: Sequence[tuple[str, float, int, int]], sent: str | None) -> None:
        """Record points, and with the last of them the value of the tag that counts the records."""
        from mlflow.entities import Metric, RunTag

        for start in range(0, len(points) or 1, _MOST_METRICS):
            metrics = [Metric(*point) for point in points[start : start + _MOST_METRICS]]
            is_last = start + _MOST_METRICS >= len(points)
            tags = [RunTag(_SENT, sent)] if is_last and sent is not None else []
            if metrics or tags:
                self.client.log_batch(self.run_id, metrics, tags=tags)

    def _log_other(self, record: Record) -> None:
        if "hparams" in record:
            self._log_params(record["hparams"])
        elif "media" in record:
            self._log_media(record)
        elif "model" in record:
            self._log_model(Path(record["model"]["path"]))

    def _log_params(self, params: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        texts = [Param(name, str(value)[:_MOST_CHARACTERS]) for name, value in flattened(params).items()]
        for start in range(0, len(texts), _MOST_PARAMS):
            self.client.log_batch(self.run_id, params=texts[start : start + _MOST_PARAMS])

    def _log_media(self, record: Record) -> None:
        media, step = record["media"], record["step"]
        stem = f"media/{media['key']}_{step}"
        if "columns" in media:
            self.client.log_dict(self.run_id, {"columns": media["columns"], "data": media["rows"]}, f"{stem}.json")
        elif "text" in media:
            self.client.log_text(self.run_id, media["text"], f"{stem}.txt")
        elif "counts" in media:
            self.client.log_dict(self.run_id, {"counts": media["counts"], "edges": media["edges"]}, f"{stem}.json")
        else:
            self._log_images(media, step, int(record["time"] * 1000))

    def _log_images(self, media: Mapping[str, Any], step: int, milliseconds: int) -> None:
        # Pillow comes with TensorBoard; most runs log no images.
        from PIL import Image

        for number, file in enumerate(media["files"]):
            key = f"{media['key']}/{number}" if len(media["files"]) > 1 else media["key"]
            with Image.open(self._identity.directory / file) as image:
                self.client.log_image(self.run_id, image, key=key, step=step, timestamp=milliseconds)

    def _log_model(self, path: Path) -> None:
        if not path.exists():
            raise Refused(f"{path} was deleted before it was sent")
        folder = "/".join(part for part in (self._checkpoints, path.stem if path.is_file() else path.name) if part)
        if path.is_dir():
            self.client.log_artifacts(self.run_id, str(path), folder)
        else:
            self.client.log_artifact(self.run_id, str(path), folder)
