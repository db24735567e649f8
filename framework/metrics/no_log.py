"""``NoLog``: takes the place of a ``MetricLog`` in hooks where logging is an error."""

from __future__ import annotations

from typing import Any

from ..core.errors import MetricError


class NoLog:
    """Takes the place of a ``MetricLog`` in hooks where logging is an error."""

    def __init__(self, where: str, instead: str) -> None:
        self._where = where
        self._instead = instead

    def log(self, name: str, *arguments: Any, **options: Any) -> None:
        """Refuse a value.

        Raises:
            MetricError: always.
        """
        raise MetricError(f"log({name!r}, ...) in {self._where}, where nothing is gathered: {self._instead}.")


OUTSIDE_LOOPS = NoLog("setup, teardown or another hook outside of the loops", "use on_train_start or a later hook")
