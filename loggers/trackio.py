"""``TrackioLogger``: records a run in Trackio."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..framework.metrics.hparams_text import flattened
from ..framework.system.environment import library_variable
from .delivery import Record, Refused, Store, metrics_of
from .remote import Identity, RemoteLogger

if TYPE_CHECKING:
    from trackio import Run

_DESTINATIONS = ("space_id", "server_url")


class TrackioLogger(RemoteLogger):
    """Record metrics, hyperparameters, media and checkpoints in a run of Trackio.

    ``experiment`` is Trackio's ``Run``. Without ``space_id`` and ``server_url`` the run is in Trackio's own directory
    on this machine, which the variable ``TRACKIO_DIR`` sets; ``trackio show`` displays it. A run that resumes continues
    the same run of Trackio. Hyperparameters are shown if they are recorded before the first metric.

    Args:
        project: the project's name; default: that of the run's directory.
        name: the run's name; default: the version of the run's directory, with a text that makes it unique.
        save_dir: root directory of the files; default: the run's.
        version: a number, or the directory's name; default: the run's, or the next free one.
        space_id: a Hugging Face Space to record in.
        server_url: a Trackio server to record in.
        log_model: ``"all"`` records every checkpoint when it is saved, True those that are left at the end.
        prefix: prepended to the key of every metric, with ``-`` between.
        kwargs: further arguments of ``trackio.init``, such as ``group``.
    """

    LIBRARY = "trackio"
    REQUIREMENT = "trackio>=0.40"

    def __init__(
        self,
        project: str | None = None,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        version: int | str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
        log_model: bool | str = False,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        super().__init__(save_dir, project, version, prefix, log_model)
        self._check_options(kwargs)
        self._run_name = name
        self._options = {"space_id": space_id, "server_url": server_url, **kwargs}

    @property
    def experiment(self) -> Run:
        return cast("Run", self._connected().run)

    def _new_store(self, identity: Identity) -> Store:
        name = self._run_name or identity.get("name") or f"{Path(self.log_dir).name}-{identity.key}"
        identity.set("name", name)
        return TrackioStore(self.name or "phalanx_logs", name, identity.directory, self._options)


class TrackioStore(Store):
    """A run of Trackio, which writes points in batches in a thread of its own, and keeps them while it is offline."""

    def __init__(self, project: str, name: str, directory: Path, options: Mapping[str, Any]) -> None:
        self._project = project
        self._name = name
        self._directory = directory
        # Monitors of the machine would write steps of their own.
        self._options = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False, **options}
        destinations = [options.get(name) or library_variable(f"TRACKIO_{name.upper()}") for name in _DESTINATIONS]
        self._is_local = not any(destinations)
        # Trackio keeps the points for a remote store itself; what was handed over is not handed over again.
        self._sent = Path(directory, "trackio.sent")

    def connect(self, records: Iterator[Record]) -> int:
        import trackio

        known = list(records)
        config: dict[str, Any] = {}
        for record in known:
            config.update(flattened(record.get("hparams", {})))
        config = {name.lstrip("_"): value for name, value in config.items()}
        self.run = trackio.init(project=self._project, name=self._name, resume="allow", config=config, **self._options)
        return self._number_stored(known) if self._is_local else _read_number(self._sent)

    def deliver(self, first: int, records: Sequence[Record]) -> None:
        for record in records:
            if "metrics" in record:
                self.run.log(metrics_of(record), step=record["step"])
            elif "media" in record:
                self.run.log(self._shown(record["media"]), step=record["step"])
            elif "model" in record:
                self._log_model(record["model"])
        if not self._is_local:
            # Of a fixed length, so that one system call replaces the whole file.
            with self._sent.open("r+b" if self._sent.exists() else "w+b", buffering=0) as file:
                file.write(b"%020d" % (first + len(records)))

    def close(self, status: str) -> None:
        self.run.finish()

    def _number_stored(self, records: Sequence[Record]) -> int:
        """Return the number of records up to the first point that the store lacks: a kill loses the newest ones."""
        from trackio import SQLiteStorage

        rows = SQLiteStorage.get_logs(self._project, self._name, run_id=self.run.id)
        stored = Counter((row["step"], frozenset(_plain_names(row))) for row in rows)
        for number, record in enumerate(records):
            names = record.get("metrics") or self._names_of(record.get("media"))
            if not names:
                continue
            point = (record["step"], frozenset(names))
            if stored[point] == 0:
                return number
            stored[point] -= 1
        return len(records)

    def _names_of(self, media: Mapping[str, Any] | None) -> list[str]:
        if media is None:
            return []
        files = media["files"]
        return [_numbered(media["key"], number, len(files)) for number in range(len(files))] or [media["key"]]

    def _shown(self, media: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of Trackio for a media item."""
        import trackio

        if "columns" in media:
            return {media["key"]: trackio.Table(columns=media["columns"], data=media["rows"])}
        if "text" in media:
            return {media["key"]: trackio.Markdown(media["text"])}
        if "counts" in media:
            return {media["key"]: trackio.Histogram(np_histogram=(media["counts"], media["edges"]))}
        captions = media.get("captions", [None] * len(media["files"]))
        return {
            name: trackio.Image(self._directory / file, caption)
            for name, file, caption in zip(self._names_of(media), media["files"], captions, strict=True)
        }

    def _log_model(self, model: Mapping[str, Any]) -> None:
        path = Path(model["path"])
        if not path.exists():
            raise Refused(f"{path} was deleted before it was recorded")
        self.run.log_artifact(path, name=f"model-{self._name}", type="model", aliases=model["aliases"])


def _numbered(key: str, number: int, count: int) -> str:
    return f"{key}/{number}" if count > 1 else key


def _plain_names(row: Mapping[str, Any]) -> list[str]:
    """Return the names of a row's metrics; Trackio has renamed those that it uses itself."""
    return [name.removeprefix("__") for name in row if name not in ("step", "timestamp")]


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0
