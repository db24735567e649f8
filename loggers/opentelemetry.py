"""``OpenTelemetryLogger``: records the newest values of a run as gauges of OpenTelemetry."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from .live import LiveLogger

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, MeterProvider

_METER = "phalanx"
# How long the end of a run waits for the values to be exported.
_FLUSH_MILLISECONDS = 4_000


class OpenTelemetryLogger(LiveLogger):
    """Record the newest value of each metric as a gauge, with the attributes ``run`` and ``metric``.

    The metric ``val/loss`` is the gauge ``phalanx.metric.val/loss``; ``phalanx.step`` and ``phalanx.epoch`` are the
    position. Where the values go is the choice of the ``MeterProvider``: an exporter sends them to a collector at
    intervals, and once more at the end of the run. ``experiment`` is the ``Meter``.

    Args:
        meter_provider: the provider; by default that of the program, which ``opentelemetry.metrics.set_meter_provider``
            or the command ``opentelemetry-instrument`` sets.
        prefix: prepended to the key of every metric, with ``-`` between.

    Example::

        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        trainer = Trainer(logger=OpenTelemetryLogger(MeterProvider([reader])))
    """

    LIBRARY = "opentelemetry.sdk.metrics"
    REQUIREMENT = "opentelemetry-sdk>=1.30"
    _LIVE: ClassVar = ("_meter",)

    def __init__(self, meter_provider: MeterProvider | None = None, prefix: str = "") -> None:
        super().__init__(prefix)
        self._provider = meter_provider
        self._meter: Meter | None = None
        self._gauges: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_gauges": {}}

    @property
    def experiment(self) -> Meter:
        if self._meter is None:
            self._meter = self._used_provider().get_meter(_METER)
        return self._meter

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Record metrics; ``step`` defaults to the last step plus one."""
        values, step = self._values(metrics, step)
        run = {"run": self.run}
        epoch = values.pop("epoch", None)
        for name, value in values.items():
            self._set(f"metric.{re.sub('[^a-zA-Z0-9_./-]', '_', name)}", value, {**run, "metric": name})
        self._set("step", step + 1, run)
        if epoch is not None:
            self._set("epoch", epoch, run)

    def finalize(self, status: str) -> None:
        """Have the provider export the values now."""
        if self._meter is not None and (flush := getattr(self._used_provider(), "force_flush", None)) is not None:
            # An exporter reports its errors itself.
            with contextlib.suppress(Exception):
                flush(_FLUSH_MILLISECONDS)

    def _used_provider(self) -> MeterProvider:
        from opentelemetry import metrics

        provider = self._provider or metrics.get_meter_provider()
        # The stand-in of a program without a provider has nothing to export.
        if self._meter is None and self._provider is None and not hasattr(provider, "force_flush"):
            self._say(
                f"{type(self).__name__}: the program has set no MeterProvider, so nothing is exported: call "
                "opentelemetry.metrics.set_meter_provider, or give the logger one."
            )
        return provider

    def _set(self, name: str, value: float, attributes: Mapping[str, str]) -> None:
        # Names of OpenTelemetry do not distinguish upper and lower case.
        key = f"phalanx.{name}"[:255].lower()
        if key not in self._gauges:
            self._gauges[key] = self.experiment.create_gauge(key)
        self._gauges[key].set(value, attributes)
