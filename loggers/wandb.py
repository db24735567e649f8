"""``WandbLogger``: records a run in Weights & Biases."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ..framework.core.errors import ConfigurationError
from ..framework.system.environment import library_variable
from .delivery import Record, Refused, Store, first_line, metrics_of
from .remote import Identity, RemoteLogger
from .wandb_files import history, records

if TYPE_CHECKING:
    from wandb.sdk.wandb_run import Run

_STEP = "trainer/global_step"
# The number of the record that a row was made from. W&B hides names that begin with an underscore.
_RECORD = "_record"
# How long, and how often, the end of an offline run looks whether its file is complete.
_WRITTEN_SECONDS = 5.0
_PERIOD_SECONDS = 0.05


class WandbLogger(RemoteLogger):
    """Record metrics, hyperparameters, media and checkpoints in a run of Weights & Biases.

    ``experiment`` is W&B's ``Run``. The horizontal axis of charts is ``trainer/global_step``. With ``offline=True``, or
    if there is no network or no API key, W&B keeps the run in a directory, and ``wandb sync`` sends it. A run that
    resumes continues the same run of W&B; offline, each process writes a directory of its own with the same id.
    The console output is recorded only with ``settings=wandb.Settings(console="wrap")``.

    Args:
        name: the run's name; default: one that W&B invents.
        save_dir: root directory of the files; default: the run's.
        version: the run's id, as ``id``.
        offline: keep the run on this machine.
        dir: the directory for W&B's own files; default: the run's.
        id: the run's id; default: one that is made for the run's directory.
        anonymous: has no effect; for compatibility.
        project: the project's name; default: the variable ``WANDB_PROJECT``, or that of the run's directory.
        log_model: ``"all"`` records every checkpoint when it is saved, True those that are left at the end.
        experiment: a run of W&B to use.
        prefix: prepended to the key of every metric, with ``-`` between.
        checkpoint_name: the name of the artifact of checkpoints; default: ``model-<id>``.
        add_file_policy: ``"mutable"`` copies a checkpoint before it is uploaded, ``"immutable"`` does not.
        kwargs: further arguments of ``wandb.init``, such as ``entity``, ``group`` and ``tags``.
    """

    LIBRARY = "wandb"
    REQUIREMENT = "wandb>=0.20"

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: bool | str = False,
        experiment: Run | None = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: str = "mutable",
        **kwargs: Any,
    ) -> None:
        project = project or library_variable("WANDB_PROJECT")
        super().__init__(save_dir, project, version or id, prefix, log_model)
        self._check_options(kwargs)
        self._options = {
            "name": name,
            "id": version or id,
            "dir": None if dir is None else os.fspath(dir),
            **({"mode": "offline"} if offline else {}),
            **kwargs,
        }
        self._given = experiment
        self._artifacts = {"name": checkpoint_name, "policy": add_file_policy}

    @property
    def experiment(self) -> Run:
        return cast("Run", self._connected().run)

    def watch(
        self, model: nn.Module, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True
    ) -> None:
        """Have W&B record gradients or parameters of a model; waits until the run is open."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def log_audio(self, key: str, audios: Sequence[Any], step: int | None = None, **kwargs: Any) -> None:
        """Record sounds: arrays or paths of files. ``kwargs`` has a list for each argument of ``wandb.Audio``."""
        self._log_here(key, "Audio", audios, step, kwargs)

    def log_video(self, key: str, videos: Sequence[Any], step: int | None = None, **kwargs: Any) -> None:
        """Record videos: arrays or paths of files. ``kwargs`` has a list for each argument of ``wandb.Video``."""
        self._log_here(key, "Video", videos, step, kwargs)

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Return an artifact of W&B, which is noted as an input of the run."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    @staticmethod
    def download_artifact(
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool | None = True,
    ) -> str:
        """Download an artifact of W&B, as an input of the current run if there is one, and return its directory."""
        import wandb

        if wandb.run is not None and use_artifact:
            found = wandb.run.use_artifact(artifact, type=artifact_type)
        else:
            found = wandb.Api().artifact(artifact, type=artifact_type)
        return str(found.download(root=None if save_dir is None else os.fspath(save_dir)))

    def _log_here(
        self, key: str, kind: str, items: Sequence[Any], step: int | None, options: Mapping[str, Sequence[Any]]
    ) -> None:
        if not isinstance(items, list | tuple):
            raise ConfigurationError(f"{key!r} is {type(items).__name__}: give a list.")
        run = self.experiment
        import wandb

        build = getattr(wandb, kind)
        values = [build(item, **{name: each[i] for name, each in options.items()}) for i, item in enumerate(items)]
        run.log({self._with_prefix(key): values, _STEP: self._step(step)})

    def _new_store(self, identity: Identity) -> Store:
        options = {**self._options, "id": self._options["id"] or identity.key, "project": self.name or None}
        options["dir"] = options["dir"] or str(identity.directory)
        # A run with a given id may have the rows of several directories, and each numbers its own.
        is_own = self._given is None and options["id"] == identity.key
        column = _RECORD if is_own else f"{_RECORD}_{identity.key}"
        return WandbStore(options, identity.directory, self._given, self._artifacts, column, self._say)


class WandbStore(Store):
    """A run of W&B, which sends rows itself and keeps them while it is offline."""

    def __init__(
        self,
        options: dict[str, Any],
        directory: Path,
        given: Run | None,
        artifacts: Mapping[str, Any],
        column: str,
        say: Any,
    ) -> None:
        self._options = options
        self._directory = directory
        self._given = given
        self._artifacts = artifacts
        self._column = column
        self._say = say

    def connect(self, records: Iterator[Record]) -> int:
        self.run = self._given or self._opened()
        self.run.define_metric(_STEP)
        self.run.define_metric("*", step_metric=_STEP, step_sync=True)
        return (self._newest_kept() if self.run.offline else self._newest_sent()) + 1

    def deliver(self, first: int, records: Sequence[Record]) -> None:
        for number, record in enumerate(records, first):
            if "metrics" in record:
                self._log(metrics_of(record), record["step"], number)
            elif "media" in record:
                self._log({record["media"]["key"]: self._shown(record["media"])}, record["step"], number)
            elif "hparams" in record:
                self.run.config.update(record["hparams"], allow_val_change=True)
            elif "model" in record:
                self._log_model(record["model"])

    def close(self, status: str) -> None:
        if self._given is None:
            self.run.finish(exit_code=0 if status == "success" else 1)
            if self.run.offline:
                self._wait_until_written()

    def _wait_until_written(self) -> None:
        """Wait for the process of W&B to write the last record; a run that resumes reads which rows there are."""
        file = Path(self.run.dir).parent / f"run-{self.run.id}.wandb"
        until = time.monotonic() + _WRITTEN_SECONDS
        while time.monotonic() < until and not any(record.HasField("exit") for record in records(file)):
            time.sleep(_PERIOD_SECONDS)

    def _opened(self) -> Run:
        """Open the run; offline if that fails, as W&B gives up after a while without a network or an API key."""
        import wandb

        # W&B would take over the standard output, on which the progress bar is drawn.
        options = {"resume": "allow", "settings": wandb.Settings(console="off", quiet=True), **self._options}
        try:
            return wandb.init(**options)
        except Exception as error:
            if options.get("mode") == "offline":
                raise
            reason = first_line(error) or type(error).__name__
        run = wandb.init(**{**options, "mode": "offline"})
        self._say(f"WandbLogger: W&B cannot be used ({reason}); the run is kept in {run.dir}: `wandb sync` sends it.")
        return run

    def _log(self, values: Mapping[str, Any], step: int, number: int) -> None:
        self.run.log({**values, _STEP: step, self._column: number})

    def _newest_sent(self) -> int:
        """Return the number of the newest record on the server, -1 for none."""
        return int(self.run.summary.get(self._column, -1))

    def _newest_kept(self) -> int:
        """Return the number of the newest record in the run's files, -1 for none; a kill loses the newest rows."""
        root = Path(self._options["dir"]) / "wandb"
        files = root.glob(f"offline-run-*-{self.run.id}/run-{self.run.id}.wandb")
        return max((int(row.get(self._column, -1)) for file in files for row in history(file)), default=-1)

    def _shown(self, media: Mapping[str, Any]) -> Any:
        """Return the value of W&B for a media item."""
        import wandb

        if "columns" in media:
            return wandb.Table(columns=media["columns"], data=media["rows"], allow_mixed_types=True)
        if "text" in media:
            return wandb.Html(f"<pre>{html.escape(media['text'], quote=False)}</pre>", inject=False)
        if "counts" in media:
            return wandb.Histogram(np_histogram=(media["counts"], media["edges"]))
        captions = media.get("captions", [None] * len(media["files"]))
        pairs = zip(media["files"], captions, strict=True)
        return [wandb.Image(str(self._directory / file), caption=caption) for file, caption in pairs]

    def _log_model(self, model: Mapping[str, Any]) -> None:
        import wandb

        path = Path(model["path"])
        if not path.exists():
            raise Refused(f"{path} was deleted before it was recorded")
        artifact = wandb.Artifact(self._artifacts["name"] or f"model-{self.run.id}", type="model")
        add = artifact.add_dir if path.is_dir() else artifact.add_file
        add(str(path), policy=self._artifacts["policy"])
        self.run.log_artifact(artifact, aliases=model["aliases"])
