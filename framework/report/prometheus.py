"""A run as metric families of Prometheus, and the HTTP server from which Prometheus collects them.

    phalanx_metric_<name>{run, metric}       the newest value of a metric; the label has the name as it was logged
    phalanx_logged_step{run, metric}         the optimizer step at which that value was logged, from 0
    phalanx_state{run, state}                1 for the state of the run, 0 for the others
    phalanx_step, phalanx_epoch, ...{run}    what is known of the run besides, see ``_FACTS``

Names of metrics that differ in characters which Prometheus does not allow share a family, as ``val/loss`` and
``val_loss`` do. A fact that is not known has no sample.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import ConfigurationError, StorageError
from ..storage.mirror import refresh_cached
from .document import run_name
from .run_files import STATES, RunFiles
from .series import is_logged
from .values import as_number, mapping

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import CollectorRegistry

REQUIREMENT = "prometheus-client>=0.20"
"""The package to install."""
PORT = 9400
"""The port by default."""
ADDRESS = "127.0.0.1"
"""The address by default, which this machine alone reaches."""
# The end of a fit does not wait longer for the thread of the server.
_CLOSE_SECONDS = 2.0

_FACTS = {
    "step": "Optimizer steps done.",
    "steps": "Optimizer steps of the entire fit.",
    "epoch": "Epochs completed.",
    "steps_per_second": "Optimizer steps per second.",
    "samples_per_second": "Samples per second over all ranks.",
    "tokens_per_second": "Tokens per second over all ranks.",
    "attempts": "Fits that have begun in the run's directory or continued in it.",
    "restarts": "Attempts after the first, without those in which the run went back to a checkpoint itself.",
    "exit_code": "Exit code of the last fit, once it has ended.",
    "began_timestamp_seconds": "Time at which the last fit began, in seconds since 1970.",
    "last_sign_of_life_timestamp_seconds": "Time at which the run last wrote its state, in seconds since 1970.",
}


@dataclass
class RunValues:
    """The values of a run that are shown."""

    run: str
    state: str
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """For each metric its newest value, and the optimizer step at which it was logged."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Numbers by the names of ``_FACTS``; what is not a number is not known."""


def families(values: RunValues) -> Iterator[GaugeMetricFamily]:
    """Yield the metric families of a run."""
    from prometheus_client.core import GaugeMetricFamily

    state = GaugeMetricFamily("phalanx_state", "1 for the state of the run, 0 for the others.", labels=("run", "state"))
    for name in STATES:
        state.add_metric((values.run, name), float(name == values.state))
    yield state
    for name, documentation in _FACTS.items():
        if (number := as_number(values.facts.get(name))) is not None:
            fact = GaugeMetricFamily(f"phalanx_{name}", documentation, labels=("run",))
            fact.add_metric((values.run,), number)
            yield fact
    logged = GaugeMetricFamily(
        "phalanx_logged_step", "Optimizer step at which a metric was logged, from 0.", labels=("run", "metric")
    )
    found: dict[str, GaugeMetricFamily] = {}
    for metric, (number, step) in sorted(values.metrics.items()):
        name = f"phalanx_metric_{re.sub('[^a-zA-Z0-9_]', '_', metric)}"
        if name not in found:
            found[name] = GaugeMetricFamily(name, "Newest value that was logged.", labels=("run", "metric"))
        found[name].add_metric((values.run, metric), number)
        logged.add_metric((values.run, metric), float(step))
    yield from found.values()
    if found:
        yield logged


def status_facts(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts in ``status.json``, which a fit writes every second."""
    throughput = mapping(status.get("throughput"))
    found = {name: status.get(name) for name in ("step", "steps", "epoch", "steps_per_second")}
    return found | {
        f"{throughput.get('unit')}_per_second": throughput.get("per_second"),
        "began_timestamp_seconds": status.get("began"),
        "last_sign_of_life_timestamp_seconds": status.get("updated"),
    }


def values_of_files(directory: Path) -> RunValues:
    """Return the values of a run from its files as they are now."""
    # A bucket that does not answer now leaves the files of the time before.
    with contextlib.suppress(StorageError):
        refresh_cached(directory)
    files = RunFiles(directory)
    attempts = files.events.attempts
    metrics = {
        name: (series.values[-1], series.steps[-1])
        for name, series in files.events.history.series.items()
        if series.values and is_logged(name)
    }
    outcome = files.outcome
    facts = status_facts(files.status)
    seen = [facts["last_sign_of_life_timestamp_seconds"], attempts[-1].seen if attempts else None]
    facts |= {
        "attempts": len(attempts),
        "restarts": sum(not attempt.is_rewind for attempt in attempts[1:]),
        "exit_code": outcome.get("exit_code", files.status.get("exit_code")),
        "last_sign_of_life_timestamp_seconds": max(filter(None, map(as_number, seen)), default=None),
    }
    if (step := as_number(outcome.get("optimizer_steps"))) is not None:
        # The supervisor of ranks that were killed knows it better than they could record it.
        facts["step"] = step
    return RunValues(run_name(files.directory), files.state, metrics, facts)


class RunCollector:
    """Reads the values of a run for each request.

    Args:
        read: returns the values.
    """

    def __init__(self, read: Callable[[], RunValues]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metric families of the run as it is now."""
        return families(self._read())


def registry_of(read: Callable[[], RunValues]) -> CollectorRegistry:
    """Return a registry of Prometheus with a run alone."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(RunCollector(read))
    return registry


def exposition(read: Callable[[], RunValues]) -> str:
    """Return the values of a run in Prometheus's text format."""
    from prometheus_client import generate_latest

    return str(generate_latest(registry_of(read)), "utf-8")


class MetricsServer:
    """An HTTP server of the values of a run, in threads of its own; it serves until ``close``.

    Args:
        read: returns the values, for each request; called in the server's threads.
        port: the port; 0 for a free one.
        address: the address to listen on.

    Raises:
        ConfigurationError: the server cannot listen there.
    """

    def __init__(self, read: Callable[[], RunValues], port: int, address: str) -> None:
        from prometheus_client import start_http_server

        try:
            self._server, self._thread = start_http_server(port, address, registry_of(read))
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"port {port} of {address} cannot be used ({error}): give another port, or 0 for a free one."
            ) from None
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self._server.server_port}/metrics"
        """The address of the metrics."""

    def close(self) -> None:
        """Stop serving, and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_CLOSE_SECONDS)


def check_endpoint(name: str, port: Any, address: Any) -> None:
    """Check a port and an address.

    Args:
        name: what takes them, for the messages.
        port: the port.
        address: the address.

    Raises:
        ConfigurationError: one of them cannot be one.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigurationError(f"{name}: port={port!r} must be a number from 0, for a free port, to 65535.")
    if not isinstance(address, str) or not address:
        raise ConfigurationError(f"{name}: addr={address!r} must be an address of this machine, such as '0.0.0.0'.")
