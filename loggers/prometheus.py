"""``PrometheusLogger``: serves the newest values of a run over HTTP, where Prometheus collects them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..framework.core.errors import ConfigurationError
from ..framework.report.prometheus import (
    ADDRESS,
    PORT,
    REQUIREMENT,
    MetricsServer,
    RunValues,
    check_endpoint,
    status_facts,
)
from ..framework.report.run_files import RunFiles
from .live import LiveLogger


class PrometheusLogger(LiveLogger):
    """Serve the newest value of each metric as a gauge, with the step, the epoch and the speed of the run.

    ``http://<addr>:<port>/metrics`` answers from the first metric or hyperparameters to the end of the run, on rank 0
    alone. The metric ``val/loss`` is the gauge ``phalanx_metric_val_loss`` with the label ``metric="val/loss"``. A port
    that is taken leaves the run without the server, with a sentence that says so. ``experiment`` is the address.

    Args:
        port: the port; 0 takes a free one, and says its address.
        addr: the address to listen on, such as ``"0.0.0.0"``; by default other machines do not reach it.
        prefix: prepended to the key of every metric, with ``-`` between.

    Example::

        trainer = Trainer(logger=["tensorboard", PrometheusLogger(port=9400, addr="0.0.0.0")])
    """

    LIBRARY = "prometheus_client"
    REQUIREMENT = REQUIREMENT
    _LIVE: ClassVar = ("_server",)

    def __init__(self, port: int = PORT, addr: str = ADDRESS, prefix: str = "") -> None:
        check_endpoint(type(self).__name__, port, addr)
        super().__init__(prefix)
        self._endpoint = port, addr
        self._server: MetricsServer | None = None
        self._has_failed = False
        self._newest: dict[str, tuple[float, int]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_newest": {}, "_has_failed": False}

    @property
    def experiment(self) -> str | None:
        return None if self._server is None else self._server.url

    def log_hyperparams(self, params: Mapping[str, Any] | None = None) -> None:
        """Start serving; hyperparameters are not shown."""
        self._serve()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Show metrics; ``step`` defaults to the last step plus one."""
        values, step = self._values(metrics, step)
        # In place of the old dict, which a thread of the server may be reading.
        self._newest = {**self._newest, **{name: (value, step) for name, value in values.items()}}
        self._serve()

    def finalize(self, status: str) -> None:
        """Stop serving."""
        server, self._server, self._has_failed, self._newest = self._server, None, False, {}
        if server is not None:
            server.close()

    def _serve(self) -> None:
        if self._server is not None or self._has_failed:
            return
        port, address = self._endpoint
        try:
            self._server = MetricsServer(self._shown, port, address)
        except ConfigurationError as error:
            self._has_failed = True
            self._say(f"{type(self).__name__}: {error} This run is not served.")
            return
        if port == 0:
            self._say(f"{type(self).__name__}: {self._server.url}")

    def _shown(self) -> RunValues:
        """Return the values now; what the run has written of itself is at most a second old."""
        facts: dict[str, Any] = {}
        if (directory := self.directory) is not None:
            facts = status_facts(RunFiles(directory).status)
        newest = dict(self._newest)
        epoch = newest.pop("epoch", None)
        if facts.get("epoch") is None and epoch is not None:
            facts["epoch"] = epoch[0]
        if facts.get("step") is None and newest:
            facts["step"] = max(step for _, step in newest.values()) + 1
        return RunValues(self.run, "running", newest, facts)
