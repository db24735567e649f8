"""What ``self.log`` does: values stay on their device, or become floats where that is free, until somebody reads them.

A value logged for each step keeps only its newest. A value logged for each epoch adds to an exact weighted sum; at the
epoch's end the sums of all names travel in one exchange, torchmetrics states included, and every rank has the same
result. In a step there is neither a collective nor a synchronisation with a device.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigurationError, MetricError, did_you_mean
from .exact import ExactSum, total_of
from .metrics import gather_states, metric_inputs, with_states
from .world import World

_REDUCTIONS = ("mean", "sum", "min", "max")
_EQUIVALENTS: dict[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
    sum: "sum",
    min: "min",
    max: "max",
}
_COMPACT_AT = 256


class Entry:
    """One logged name: how it is reduced, where it goes, its newest value and what has gathered so far."""

    __slots__ = ("device", "extreme", "flags", "fx", "last", "logger", "metric", "name", "on_epoch", "on_step",
                 "prog_bar", "total", "weight")  # fmt: skip

    def __init__(self, name: str, flags: tuple[Any, ...], fx: str, on_step: bool, on_epoch: bool) -> None:
        self.name = name
        self.flags = flags
        self.prog_bar: bool = flags[0]
        self.logger: bool = flags[1]
        self.fx = fx
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.metric: Any = None
        self.last: Any = None
        self.clear()

    @property
    def step_name(self) -> str:
        """The name of the step's value: suffixed where there is an epoch's value too."""
        return f"{self.name}_step" if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        """The name of the epoch's value: suffixed where there is a step's value too."""
        return f"{self.name}_epoch" if self.on_step else self.name

    def clear(self) -> None:
        """Forget what has gathered."""
        self.total = ExactSum()
        self.weight = 0.0
        self.extreme: float | None = None
        self.device: list[tuple[Tensor, float]] = []

    def add(self, value: float, weight: float) -> None:
        """Gather a number."""
        if self.fx == "mean":
            self.total.add(value * weight)
            self.weight += weight
        elif self.fx == "sum":
            self.total.add(value)
            self.weight += 1.0
        else:
            better = max if self.fx == "max" else min
            self.extreme = value if self.extreme is None else better(self.extreme, value)
            self.weight += 1.0

    def add_on_device(self, value: Tensor, weight: float) -> None:
        """Gather a tensor without waiting for its device; every so often many become one, there."""
        self.device.append((value, weight))
        if len(self.device) >= _COMPACT_AT and self.fx in ("mean", "sum"):
            values = torch.stack([tensor.double().reshape(()) for tensor, _ in self.device])
            weights = torch.tensor([w for _, w in self.device], dtype=torch.float64).to(
                values.device, non_blocking=True
            )
            self.weight += sum(w for _, w in self.device) if self.fx == "mean" else 0.0
            combined = (values * weights).sum() if self.fx == "mean" else values.sum()
            self.device = [(combined, 0.0)] if self.fx == "sum" else [(combined, -1.0)]

    def settle(self) -> None:
        """Bring what is on the device into the sums: the one synchronisation, when somebody reads."""
        waiting, self.device = self.device, []
        if not waiting:
            return
        numbers = torch.stack([tensor.double().reshape(()) for tensor, _ in waiting]).tolist()
        for number, (_, weight) in zip(numbers, waiting, strict=True):
            if weight < 0:  # many values, combined with their weights already
                self.total.add(number)
            else:
                self.add(number, weight)

    def local(self) -> tuple[str, list[float], float]:
        """Return this rank's part: the reduction's name, its numbers, its weight."""
        self.settle()
        if self.fx in ("mean", "sum"):
            return self.fx, self.total.partials(), self.weight
        return self.fx, [] if self.extreme is None else [self.extreme], self.weight

    def restore(self, numbers: list[float], weight: float) -> None:
        """Take over what ``local`` returned."""
        self.weight = weight
        if self.fx in ("mean", "sum"):
            self.total = ExactSum(list(numbers))
        else:
            self.extreme = numbers[0] if numbers else None


def combine(parts: Sequence[tuple[str, list[float], float]]) -> float:
    """Return the value of one name from the parts of all ranks."""
    numbers = [number for _, values, _ in parts for number in values]
    fx = parts[0][0]
    if fx in ("min", "max"):
        return (min if fx == "min" else max)(numbers) if numbers else float("nan")
    total = total_of(numbers)
    if fx == "sum":
        return total
    weight = total_of([weight for _, _, weight in parts])
    return total / weight if weight else float("nan")


class MetricLog:
    """The logged values of one stage of a run (``"train"``, ``"validate"``, ``"test"``).

    ``in_step`` says whether a step is running, which decides the defaults; the loop sets it once for each epoch, and
    ``batch`` for each micro-batch, from which the weight of an epoch's mean is read when it is needed.
    """

    def __init__(self, stage: str, world: World) -> None:
        self.stage = stage
        self.world = world
        self.batch: Any = None
        self.items: int | None = None
        self.batches = 0
        self.suffix = ""
        self.results: dict[str, Tensor] = {}
        self._scopes: dict[bool, dict[str, Entry]] = {True: {}, False: {}}
        self._entries = self._scopes[False]
        self._training = stage == "train"

    @property
    def in_step(self) -> bool:
        """Whether values belong to a step, or to a hook of the epoch."""
        return self._entries is self._scopes[True]

    @in_step.setter
    def in_step(self, value: bool) -> None:
        self._entries = self._scopes[value]

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool,
        logger: bool,
        on_step: bool | None,
        on_epoch: bool | None,
        reduce_fx: str | Callable[..., Any],
        batch_size: int | float | Tensor | None,
        add_dataloader_idx: bool,
    ) -> None:
        """Keep a value. The first call of a name fixes how it is reduced and where it goes."""
        if self.suffix and add_dataloader_idx:
            name += self.suffix
        flags = (prog_bar, logger, on_step, on_epoch, reduce_fx)
        entry = self._entries.get(name)
        if entry is None or entry.flags != flags:
            entry = self._new_entry(name, flags, entry)
        if isinstance(value, Tensor):
            if not value.is_cpu:
                self._keep_on_device(entry, value, batch_size)
                return
            # A number at once: on a CPU that waits for nothing, and the tensor may change in place later.
            try:
                value = value.item()
            except RuntimeError:
                raise _not_one_element(name, value) from None
        elif value.__class__ is not float and not isinstance(value, (int, float)):
            value = self._unusual(entry, value)
            if value is None:
                return
        entry.last = value
        if entry.on_epoch:
            entry.add(value, 1.0 if entry.fx != "mean" else self._weight(batch_size))

    def _weight(self, batch_size: int | float | Tensor | None) -> float:
        if batch_size is not None:
            return float(batch_size)
        if self.items is None:
            self.items = batch_items(self.batch)
        return self.items

    def _keep_on_device(self, entry: Entry, value: Tensor, batch_size: int | float | Tensor | None) -> None:
        if value.numel() != 1:
            raise _not_one_element(entry.name, value)
        # A tensor without graph may be a buffer that its owner changes in place later; a loss is nobody's buffer.
        value = value.detach() if value.requires_grad else value.clone()
        entry.last = value
        if entry.on_epoch:
            entry.add_on_device(value, 1.0 if entry.fx != "mean" else self._weight(batch_size))

    def _unusual(self, entry: Entry, value: Any) -> float | None:
        """Return the number of a value that is no plain number or tensor; None for a metric, which keeps itself."""
        torchmetrics = sys.modules.get("torchmetrics")
        if torchmetrics is not None and isinstance(value, torchmetrics.Metric):
            entry.metric = value
            if entry.on_step:
                entry.last = value._forward_cache
            return None
        try:
            return float(value)
        except (TypeError, ValueError):
            raise MetricError(
                f"log({entry.name!r}, ...) got a {type(value).__name__}; "
                "a value must be a number, a tensor with one element, or a torchmetrics Metric."
            ) from None

    def _new_entry(self, name: str, flags: tuple[Any, ...], old: Entry | None) -> Entry:
        if old is not None:
            raise ConfigurationError(
                f"log({name!r}, ...) was called with other arguments before in this hook: the arguments "
                "prog_bar, logger, on_step, on_epoch and reduce_fx of a name must stay the same; use another name."
            )
        _, _, on_step, on_epoch, reduce_fx = flags
        if not isinstance(name, str):
            raise ConfigurationError(f"log({name!r}, ...): a name must be a string.")
        fx = _EQUIVALENTS.get(reduce_fx, reduce_fx) if not isinstance(reduce_fx, str) else reduce_fx
        if fx not in _REDUCTIONS:
            raise ConfigurationError(
                f"log({name!r}, reduce_fx={reduce_fx!r}) is not known.{did_you_mean(str(fx), _REDUCTIONS)} "
                f"Known: {', '.join(_REDUCTIONS)}; for anything else log a torchmetrics Metric."
            )
        stepwise = self._training and self.in_step
        on_step = stepwise if on_step is None else on_step
        on_epoch = not stepwise if on_epoch is None else on_epoch
        if on_step and not self.in_step:
            raise ConfigurationError(f"log({name!r}, on_step=True) in a hook of the epoch: use on_epoch=True there.")
        entry = Entry(name, flags, fx, on_step, on_epoch)
        self._entries[name] = entry
        return entry

    def __iter__(self) -> Iterator[Entry]:
        for scope in self._scopes.values():
            yield from scope.values()

    def step_values(self, wanted: str) -> dict[str, Any]:
        """Return the newest step values of the entries whose attribute ``wanted`` is true, as numbers or tensors."""
        return {
            entry.step_name: entry.last
            for entry in self._scopes[True].values()
            if entry.on_step and entry.last is not None and getattr(entry, wanted)
        }

    def current(self) -> dict[str, Any]:
        """Return the newest step values for callbacks: under the step's name, and under the plain one."""
        values = self.step_values("on_step")
        values.update({e.name: e.last for e in self if e.on_step and e.on_epoch and e.last is not None})
        return values

    def reduce(self) -> dict[Entry, Tensor]:
        """Return the epoch's value of each entry and start anew. Collective, one exchange for all names.

        Raises:
            MetricError: ranks that had data logged different names.
        """
        entries = {entry.name: entry for entry in self if entry.on_epoch}
        if not self._any_rank_has(entries):
            self._start_anew()
            return {}
        metrics = {name: entry for name, entry in entries.items() if entry.metric is not None}
        payload = {
            "batches": self.batches,
            "values": {name: entry.local() for name, entry in entries.items() if entry.metric is None},
            "metrics": {name: metric_inputs(entry.metric, self.world.size) for name, entry in metrics.items()},
            "flags": {name: (entry.flags[:2], entry.on_step) for name, entry in entries.items()},
        }
        gathered = self.world.all_gather_object(payload)
        self._check_same_names(gathered)
        results = self._values(gathered, entries)
        self._start_anew()
        return results

    def _any_rank_has(self, entries: Mapping[str, Entry]) -> bool:
        # With several ranks the exchange must not depend on what one of them logged.
        return bool(entries) or self.world.size > 1

    def _values(self, gathered: list[dict[str, Any]], entries: dict[str, Entry]) -> dict[Entry, Tensor]:
        results: dict[Entry, Tensor] = {}
        names = dict.fromkeys(name for part in gathered for name in part["flags"])
        for name in names:
            entry = entries.get(name) or _stand_in(name, gathered)
            parts = [part["values"][name] for part in gathered if name in part["values"]]
            if parts:
                results[entry] = torch.tensor(combine(parts), dtype=torch.float32)
            elif entry.metric is not None:
                states = gather_states(part["metrics"][name] for part in gathered if name in part["metrics"])
                results[entry] = with_states(entry.metric, states, self.world.size > 1)
        if self.world.size > 1 and any(part["metrics"] for part in gathered):
            results = self._complete(gathered, results, names, entries)
        return results

    def _complete(
        self,
        gathered: list[dict[str, Any]],
        results: dict[Entry, Tensor],
        names: Mapping[str, None],
        entries: dict[str, Entry],
    ) -> dict[Entry, Tensor]:
        """Give the values of metrics to ranks that had no data, and so never logged the metric."""
        if all(set(part["flags"]) == set(names) for part in gathered):
            return results
        source = next(rank for rank, part in enumerate(gathered) if part["metrics"])
        values = self.world.broadcast_object({entry.name: value for entry, value in results.items()}, src=source)
        return {entries.get(name) or _stand_in(name, gathered): value for name, value in values.items()}

    def _check_same_names(self, gathered: list[dict[str, Any]]) -> None:
        with_data = {rank: set(part["flags"]) for rank, part in enumerate(gathered) if part["batches"]}
        everything = set().union(*with_data.values()) if with_data else set()
        for rank, names in with_data.items():
            for name in sorted(everything - names):
                other = next(r for r, theirs in with_data.items() if name in theirs)
                raise MetricError(
                    f"rank {rank} did not log {name!r} in {self.stage}, rank {other} did; "
                    "every rank that has data must log the same names in an epoch."
                    + did_you_mean(name, names - with_data[other])
                )

    def _start_anew(self) -> None:
        for entry in self:
            if entry.metric is not None and entry.on_epoch:
                entry.metric.reset()
        self._scopes[True].clear()
        self._scopes[False].clear()
        self.batches = 0
        self.batch = None
        self.items = None

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has gathered in the epoch so far."""
        return {
            "batches": self.batches,
            "entries": [
                {"name": e.name, "flags": _plain(e.flags), "on_step": e.on_step, "on_epoch": e.on_epoch, "fx": e.fx}
                | {"local": list(e.local())[1:]}
                for e in self._scopes[True].values()
                if e.on_epoch and e.metric is None
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue an epoch from what ``state_dict`` returned."""
        self.batches = state["batches"]
        for item in state["entries"]:
            entry = Entry(item["name"], tuple(item["flags"]), item["fx"], item["on_step"], item["on_epoch"])
            entry.restore(*item["local"])
            self._scopes[True][entry.name] = entry


def _plain(flags: tuple[Any, ...]) -> list[Any]:
    return [*flags[:4], flags[4] if isinstance(flags[4], str) else _EQUIVALENTS[flags[4]]]


def _stand_in(name: str, gathered: list[dict[str, Any]]) -> Entry:
    """Return an entry for a name that this rank did not log, having had no data."""
    flags, on_step = next(part["flags"][name] for part in gathered if name in part["flags"])
    return Entry(name, (*flags, on_step, True, "mean"), "mean", on_step, True)


def _not_one_element(name: str, value: Tensor) -> MetricError:
    return MetricError(
        f"log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; a value must have one element: "
        "reduce it first, with .mean() for example."
    )


def batch_items(batch: Any) -> int:
    """Return how many items a batch holds: the first dimension of its first tensor, or 1 where there is none."""
    sizes = _sizes(batch)
    return next(sizes, 1)


def _sizes(batch: Any) -> Iterator[int]:
    if isinstance(batch, Tensor):
        yield batch.size(0) if batch.dim() else 1
    elif isinstance(batch, str):
        yield len(batch)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _sizes(value)
    elif isinstance(batch, Sequence):
        for value in batch:
            yield from _sizes(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _sizes(getattr(batch, field.name))
