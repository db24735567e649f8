"""Custom logger: send metrics wherever you want.

``name``, ``version`` and ``log_metrics`` are all that a logger needs; phalanx calls them on rank 0, in a thread of
their own. The check: the rows of the logger agree with those of ``CSVLogger``.
"""

from __future__ import annotations

import csv
import sqlite3
from collections.abc import Mapping
from pathlib import Path

from tasks import DigitClassifier, digit_loaders, recipe_options

from phalanx import Trainer, seed_everything
from phalanx.loggers import CSVLogger, Logger


class SQLiteLogger(Logger):
    """Writes each metric as a row of a table ``metrics(step, name, value)``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with sqlite3.connect(path) as database:
            database.execute("CREATE TABLE IF NOT EXISTS metrics (step INTEGER, name TEXT, value REAL)")

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        with sqlite3.connect(self.path) as database:
            rows = [(step, name, value) for name, value in metrics.items()]
            database.executemany("INSERT INTO metrics VALUES (?, ?, ?)", rows)


def main() -> None:
    options = recipe_options(__doc__)
    seed_everything(1)
    out = Path(options.out) / "custom_logger"
    out.mkdir(parents=True, exist_ok=True)
    database = out / "metrics.sqlite"
    database.unlink(missing_ok=True)
    loggers = [CSVLogger(name="digits"), SQLiteLogger(database)]
    trainer = Trainer(
        max_epochs=2 if options.short else 10, default_root_dir=out, logger=loggers, log_every_n_steps=5, verbose=False
    )
    trainer.fit(DigitClassifier(), *digit_loaders())

    with sqlite3.connect(database) as opened:
        stored = opened.execute("SELECT step, value FROM metrics WHERE name = 'train_loss' ORDER BY step").fetchall()
    rows = csv.DictReader((trainer.run_dir / "metrics.csv").read_text().splitlines())
    expected = [(int(row["step"]), float(row["train_loss"])) for row in rows if row["train_loss"]]
    print(f"{len(stored)} values of train_loss in {database}")
    assert stored == expected
    assert len(stored) >= 9


if __name__ == "__main__":
    main()
