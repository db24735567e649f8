"""``recorded_value``: the value of a metric by which runs are compared, from the report of a run."""

from __future__ import annotations

from typing import Any

from ..framework.metrics.monitor import missing_metric
from ..framework.report.series import OWN_PREFIX
from ..framework.report.values import as_number, listed, mapping


def recorded_value(report: dict[str, Any], metric: str, mode: str, which: str = "best") -> float:
    """Return the best or the last value of a metric in the report of a run; values that are not finite do not count.

    Args:
        report: the report.
        metric: the name under which it was logged.
        mode: ``"min"`` if lower values are better, or ``"max"``.
        which: ``"best"`` or ``"last"``.

    Raises:
        MetricError: the run has recorded no value; the message has the closest name.
    """
    curves, metrics = mapping(report.get("curves")), mapping(report.get("metrics"))
    given = [*listed(mapping(curves.get(metric)).get("value")), metrics.get(metric)]
    known = [number for value in given if (number := as_number(value)) is not None]
    if not known:
        names = {name for name in (*curves, *metrics) if not name.startswith(OWN_PREFIX)}
        raise missing_metric("--metric", metric, names - {metric})
    if which == "last":
        return known[-1]
    return min(known) if mode == "min" else max(known)
