"""State of a ``MetricLog`` for checkpoints: its entries, and the metrics of its module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from .metric_entry import Entry, Flags, Scope
from .torchmetrics_state import load_metric_states, metric_states

Scopes = Mapping[bool, Scope]
"""Under True the names logged in steps, under False those logged in hooks of the epoch."""


def entries_state(scopes: Scopes, module: nn.Module | None) -> dict[str, Any]:
    """Return the entries and the states of the module's metrics. ``read_devices`` must have been called before."""
    logs_metrics = any(entry.metric is not None for scope in scopes.values() for entry in scope.entries.values())
    places = {id(part): name for name, part in module.named_modules()} if module is not None and logs_metrics else {}
    return {
        "entries": [
            {
                "name": entry.name,
                "flags": list(entry.flags._replace(reduce_fx=entry.fx)),
                "when": [entry.on_step, entry.on_epoch],
                # Copies: the entry appends to its lists.
                "local": [[*numbers] for numbers in entry.local()[1:]],
                "in_step": in_step,
                "last": None if last is None else float(last),
                "metric": None if entry.metric is None else places[id(entry.metric)],
            }
            for in_step, scope in scopes.items()
            for entry, last in zip(scope.entries.values(), scope.latest, strict=True)
            # A metric outside the module has no name by which it could be found again.
            if entry.metric is None or id(entry.metric) in places
        ],
        "metrics": metric_states(module) if module is not None else {},
    }


def load_entries(scopes: Scopes, module: nn.Module | None, states: Sequence[Mapping[str, Any]]) -> None:
    """Add what ``entries_state`` returned on one rank or several to the entries and to the module's metrics."""
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
