"""State of a ``MetricLog`` for checkpoints: its entries, and the metrics of its module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .host_numbers import read_numbers
from .metric_entry import Entry, Flags, Scope, read_devices
from .torchmetrics_state import load_metric_states, metric_states

Scopes = Mapping[bool, Scope]
"""Under True the names logged in steps, under False those logged in hooks of the epoch."""


class LogRecord:
    """The values of a ``MetricLog`` at one moment. Only ``state_dict`` waits for devices."""

    def __init__(self, scopes: Scopes, module: nn.Module | None, batches: int) -> None:
        self._batches = batches
        self._entries = {
            in_step: [*zip([entry.copied() for entry in scope.entries.values()], scope.latest, strict=True)]
            for in_step, scope in scopes.items()
        }
        self._module = module
        self._metrics = metric_states(module) if module is not None else {}

    def put_back(self, scopes: Scopes) -> int:
        """Put the values of the moment back, of the module's metrics, too; return the number of batches. Once."""
        for in_step, scope in scopes.items():
            scope.clear()
            for entry, last in self._entries[in_step]:
                scope.add(entry.plain_name, entry)
                scope.latest[entry.index] = last
        if self._module is not None:
            load_metric_states(self._module, self._metrics)
        return self._batches

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the entries, and the states of the module's metrics."""
        pairs = [(in_step, *pair) for in_step, entries in self._entries.items() for pair in entries]
        read_devices(entry for _, entry, _ in pairs)
        latest = read_numbers([last for _, _, last in pairs])
        logs_metrics = any(entry.metric is not None for _, entry, _ in pairs)
        parts = self._module.named_modules() if self._module is not None and logs_metrics else ()
        places = {id(part): name for name, part in parts}
        return {
            "batches": self._batches,
            "entries": [
                {
                    "name": entry.name,
                    "flags": list(entry.flags._replace(reduce_fx=entry.fx)),
                    "when": [entry.on_step, entry.on_epoch],
                    "local": list(entry.local()[1:]),
                    "in_step": in_step,
                    "last": last,
                    "metric": None if entry.metric is None else places[id(entry.metric)],
                }
                for (in_step, entry, _), last in zip(pairs, latest, strict=True)
                # A metric outside the module has no name by which it could be found again.
                if entry.metric is None or id(entry.metric) in places
            ],
            "metrics": self._metrics,
        }


def load_entries(scopes: Scopes, module: nn.Module | None, states: Sequence[Mapping[str, Any]]) -> None:
    """Add what ``LogRecord.state_dict`` returned on one rank or several to the entries and to the module's metrics."""
    for item in (item for state in states for item in state["entries"]):
        flags = Flags(*item["flags"])
        scope = scopes[item.get("in_step", True)]
        name = item["name"]
        entry = scope.entries.get(name) or scope.add(name, Entry(name, flags, flags.reduce_fx, *item["when"]))
        entry.restore(*item["local"])
        if scope.latest[entry.index] is None:
            scope.latest[entry.index] = item.get("last")
        if item.get("metric") is not None and module is not None:
            entry.log_metric(module.get_submodule(item["metric"]))
    if module is not None:
        load_metric_states(module, *[state["metrics"] for state in states])
