"""``CSVLogger``: writes metrics as rows of ``metrics.csv``."""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

from ..framework.core.errors import ConfigurationError
from ..framework.metrics.file_logger import FileLogger, plain_number

_METRICS_FILE = "metrics.csv"
# A user who follows the file of a slow run should not have to wait for a hundred steps.
_FLUSH_SECONDS = 15.0


class CSVLogger(FileLogger):
    """Write metrics to ``metrics.csv`` and hyperparameters to ``hparams.yaml``.

    The file has one column for each key, in alphabetical order, and one row for each call; a cell is empty if the call
    did not have the key. Rows are buffered in memory and appended every ``flush_logs_every_n_steps`` steps, after some
    seconds, and before a checkpoint is written; only a new column rewrites the file. The rows of a resumed run follow
    those from before its checkpoint; rows written after the checkpoint are dropped, so the file equals that of an
    uninterrupted run.

    Args:
        save_dir: root directory of the files; default: the run's.
        name: the experiment's name; ``""`` omits this directory level; default: the run's.
        version: a number, or the directory's name; default: the run's, or the next free one. Like an empty name, it
            applies only to the logger's files, not to checkpoints.
        prefix: prepended to the key of every metric, with ``-`` between.
        flush_logs_every_n_steps: the largest number of steps between two writes.
    """

    _LIVE: ClassVar = {"_lock": Lock, "_rows": list, "_table": type(None)}

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        if flush_logs_every_n_steps < 1:
            raise ConfigurationError(f"flush_logs_every_n_steps={flush_logs_every_n_steps}: give 1 or more.")
        self._flush_every = flush_logs_every_n_steps
        self._rows: list[dict[str, Any]] = []
        self._flushed_step = 0
        self._flushed_at = time.monotonic()
        self._table: _Table | None = None
        # Metrics arrive in the writer thread; a user may call from the training thread as well.
        self._lock = Lock()

    @property
    def experiment(self) -> CSVLogger:
        return self

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Add one row; ``step`` defaults to the last step plus one."""
        row = {self._with_prefix(key): plain_number(value) for key, value in metrics.items()}
        now = time.monotonic()
        with self._lock:
            row["step"] = step = self._count_step(step)
            self._rows.append(row)
            due = step + 1 - self._flushed_step >= self._flush_every or now - self._flushed_at >= _FLUSH_SECONDS
        if due:
            self.save()

    def log_hyperparams(self, params: Any = None) -> None:
        self._write_hparams(params)

    def save(self) -> None:
        with self._lock:
            self._flushed_step = self._next_step
            self._flushed_at = time.monotonic()
            if not self._rows:
                return
            if self._table is None:
                self._table = _Table(self._make_log_dir() / _METRICS_FILE)
            self._table.append(self._rows)
            self._rows = []

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {"directory": self.log_dir, "rows": self._opened().count() + len(self._rows)}

    def resume(self, step: int, state: Mapping[str, Any]) -> None:
        if "rows" in state and self._has_own_files(state):
            self._opened().keep(int(state["rows"]))

    def _opened(self) -> _Table:
        return self._table or _Table(Path(self.log_dir) / _METRICS_FILE)

    def finalize(self, status: str) -> None:
        self.save()
        # A later run of this object may be attached to another directory.
        self._table = None


class _Table:
    """A CSV file that is extended by rows and, rarely, by columns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns = _repaired_header(path)
        self._count: int | None = None

    def count(self) -> int:
        """Return the number of rows."""
        if self._count is None:
            self._count = sum(1 for _ in self._rows())
        return self._count

    def append(self, rows: list[dict[str, Any]]) -> None:
        new = {key for row in rows for key in row} - set(self._columns)
        if new:
            self._rewrite(sorted({*self._columns, *new}), self._rows())
        size = self._path.stat().st_size
        try:
            with self._path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self._columns).writerows(rows)
        except BaseException:
            # The rows are appended again by the next call.
            with contextlib.suppress(OSError):
                os.truncate(self._path, size)
            raise
        if self._count is not None:
            self._count += len(rows)

    def keep(self, count: int) -> None:
        """Drop the rows after the first ``count``, and the columns that only the dropped rows had."""
        if self.count() <= count:
            return
        rows = list(itertools.islice(self._rows(), count))
        self._rewrite([key for key in self._columns if any(row[key] for row in rows)], rows)
        self._count = count

    def _rows(self) -> Iterator[dict[str, Any]]:
        if self._columns:
            with self._path.open(newline="", encoding="utf-8") as source:
                for row in csv.DictReader(source):
                    # A row that was cut off by a kill has None for missing cells.
                    yield {key: value or "" for key, value in row.items() if key is not None}

    def _rewrite(self, columns: list[str], rows: Iterable[dict[str, Any]]) -> None:
        # Into a sibling first: a run that is killed here retains its earlier metrics.
        sibling = self._path.with_name(self._path.name + ".new")
        try:
            with sibling.open("w", newline="", encoding="utf-8") as target:
                writer = csv.DictWriter(target, columns, extrasaction="ignore")
                if columns:
                    writer.writeheader()
                writer.writerows(rows)
            os.replace(sibling, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                sibling.unlink()
            raise
        self._columns = columns


def _repaired_header(path: Path) -> list[str]:
    """Return the columns of an existing file, terminating a last row that a kill cut off; empty if there is no file."""
    # Left by a rewrite that was interrupted by a kill.
    path.with_name(path.name + ".new").unlink(missing_ok=True)
    if not path.exists() or path.stat().st_size == 0:
        return []
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\r\n")
    with path.open(newline="", encoding="utf-8") as text:
        return next(csv.reader(text), [])
