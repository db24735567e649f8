"""``JSONLinesLogger``: writes metrics, hyperparameters and media as lines of ``metrics.jsonl``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

from ..framework.metrics.file_logger import FileLogger, plain_number
from ..framework.metrics.json_lines import JsonLines, read_lines, whole_bytes
from ..framework.metrics.logger import media_record
from ..framework.metrics.media import Media

_METRICS_FILE = "metrics.jsonl"


class JSONLinesLogger(FileLogger):
    """Write one JSON object for each record to ``metrics.jsonl``, and hyperparameters to ``hparams.yaml`` as well.

    A line is one of three objects; ``time`` is in seconds since 1970::

        {"step": 49, "time": 1790000000.25, "metrics": {"train_loss": 0.5, "epoch": 0}}
        {"time": 1790000000.01, "hparams": {"lr": 0.1}}
        {"step": 49, "time": 1790000000.3,
         "media": {"key": "samples", "kind": "images", "files": ["media/samples_49.png"], "captions": ["a"]}}

    Numbers that are not finite are the texts ``"nan"``, ``"inf"`` and ``"-inf"``. Files are relative to the file's
    directory. Each line is written at once by one system call, so a program may follow the file. What a killed process
    wrote of its last line is cut off. A resumed run drops the lines after its checkpoint and writes them again, so no
    step is in the file twice.

    Args:
        save_dir: root directory of the files; default: the run's.
        name: the experiment's name; ``""`` omits this directory level; default: the run's.
        version: a number, or the directory's name; default: the run's, or the next free one. Like an empty name, it
            applies only to the logger's files, not to checkpoints.
        prefix: prepended to the key of every metric, with ``-`` between.
    """

    _LIVE: ClassVar = {"_lock": Lock, "_lines": type(None)}

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self._lines: JsonLines | None = None
        # Metrics arrive in the writer thread; a user may call from the training thread as well.
        self._lock = Lock()

    @property
    def experiment(self) -> JSONLinesLogger:
        return self

    @property
    def path(self) -> Path:
        """The file of the lines."""
        return Path(self.log_dir) / _METRICS_FILE

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write one line; ``step`` defaults to the last step plus one."""
        step = self._count_step(step)
        values = {self._with_prefix(key): plain_number(value) for key, value in metrics.items()}
        self._append({"step": step, "time": time.time(), "metrics": values})

    def log_hyperparams(self, params: Any = None) -> None:
        params = self._write_hparams(params)
        self._append({"time": time.time(), "hparams": params})

    def log_media(self, media: Media) -> None:
        record = media_record(media, self._write_files(media), Path(self.log_dir))
        self._append({"step": media.step, "time": time.time(), "media": record})

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {"directory": self.log_dir, "bytes": whole_bytes(self.path)}

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        if self._has_own_files(state):
            with self._lock:
                JsonLines(self.path).keep(state["bytes"] if "bytes" in state else _end_of_steps(self.path, step))

    def finalize(self, status: str) -> None:
        with self._lock:
            lines, self._lines = self._lines, None
        if lines is not None:
            lines.close()

    def _append(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            if self._lines is None:
                self._make_log_dir()
                self._lines = JsonLines(self.path)
            self._lines.append(record)


def _end_of_steps(path: Path, step: int) -> int:
    """Return the position after the last line of the steps before ``step``, for a checkpoint that lacks it."""
    end = 0
    for position, record in read_lines(path):
        if record.get("step", -1) >= step:
            break
        end = position
    return end
