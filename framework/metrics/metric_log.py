"""``MetricLog``: the values that ``self.log`` records. They stay on their device until they are read.

Of a name logged per step only the latest value is stored. A name logged per epoch is added to an exact weighted sum. At
the end of the epoch the sums of all names, torchmetrics states included, are exchanged at once, and every rank has the
same result. A step contains neither a collective nor a device synchronization.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigurationError, MetricError, did_you_mean
from ..distributed.object_frames import FrameSize
from ..distributed.world import World
from .epoch_reduction import exchange
from .metric_entry import Entry, Flags, read_devices
from .torchmetrics_state import is_collection, is_metric, load_metric_states, metric_states

_REDUCTIONS = ("mean", "sum", "min", "max")
_EQUIVALENTS: dict[Any, str] = {
    "avg": "mean",
    torch.mean: "mean",
    torch.sum: "sum",
    torch.min: "min",
    torch.max: "max",
    sum: "sum",
    min: "min",
    max: "max",
}
_LOADER_SUFFIX = "/dataloader_idx_"
_MARK = (1 << 20) - 1


class MetricLog:
    """The logged values of one stage of a run (``"train"``, ``"validate"``, ``"test"``).

    ``in_step``: whether a step is running, which determines the defaults. The loop sets it once per epoch, and
    ``batch`` for each micro-batch; the weight of an epoch mean is computed from the batch when needed. ``batches``
    counts the micro-batches. With several loaders, ``fed`` holds the numbers of those that had a batch for this rank.
    """

    def __init__(self, stage: str, world: World, module: nn.Module | None = None) -> None:
        """``module``: the module whose metrics are part of the state."""
        self.stage = stage
        self.world = world
        self.batch: Any = None
        self.items: int | None = None
        self.batches = 0
        self.fed: set[int | None] = set()
        self._module = module
        self._loader: int | None = None
        self._suffix = ""
        self._scopes: dict[bool, dict[str, Entry]] = {True: {}, False: {}}
        self._entries = self._scopes[False]
        self._training = stage == "train"
        self._speaks = world.rank == 0
        self._used_metrics: list[Any] = []
        self._frame_size = FrameSize()
        self.mark = 0
        """A hash, below 2**20, of the names that all ranks log for the end of the epoch."""

    @property
    def in_step(self) -> bool:
        """Whether values belong to a step rather than to an epoch hook."""
        return self._entries is self._scopes[True]

    @in_step.setter
    def in_step(self, value: bool) -> None:
        self._entries = self._scopes[value]
        # Epoch values have the same weight on every rank, so the last batch must not count; this also releases it.
        self.batch = None
        self.items = None

    @property
    def loader(self) -> int | None:
        """The number of the evaluation loader if there are several: it is a suffix of names."""
        return self._loader

    @loader.setter
    def loader(self, value: int | None) -> None:
        self._loader = value
        self._suffix = "" if value is None else f"{_LOADER_SUFFIX}{value}"

    # ---- writing --------------------------------------------------------------------------------------------------

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[..., Any] = "mean",
        sync_dist: bool = True,
        batch_size: int | float | Tensor | None = None,
        add_dataloader_idx: bool = True,
        rank_zero_only: bool = False,
        enable_graph: bool = False,
        sync_dist_group: Any = None,
        metric_attribute: str | None = None,
    ) -> None:
        """Record a value; ``TrainModule.log`` is this method while a run is in progress, with the same arguments.

        The first call for a name fixes its reduction and its destinations.
        """
        if rank_zero_only and not self._speaks:
            return
        key = name + self._suffix if add_dataloader_idx and self._suffix else name
        flags = (prog_bar, logger, on_step, on_epoch, reduce_fx, rank_zero_only)
        entry = self._entries.get(key)
        # A plain tuple equals the named one of the entry, and is several times faster to create.
        if entry is None or entry.flags != flags:
            entry = self._entry(name, key, Flags(*flags), entry)
        if isinstance(value, Tensor):
            if not value.is_cpu:
                self._keep_on_device(entry, value, batch_size)
                return
            # Converted to a number at once: on a CPU this does not wait, and the tensor may change in place later.
            try:
                value = value.item()
            except RuntimeError:
                raise _not_one_element(name, value) from None
        if value.__class__ is not float:
            value = self._number(entry, value)
            if value is None:
                return
        entry.last = value
        if entry.on_epoch:
            if batch_size is None:
                entry.add(value, self.items or self._count_items(entry))
            elif isinstance(batch_size, Tensor) and not batch_size.is_cpu:
                entry.add_on_device(value, batch_size.detach().clone())
            else:
                entry.add(value, float(batch_size))

    def _count_items(self, entry: Entry) -> int:
        """Return the weight of the batch: its number of items, counted when first needed for a mean."""
        if self.items is None and entry.fx == "mean":
            self.items = batch_items(self.batch)
        return self.items or 0

    def _keep_on_device(self, entry: Entry, value: Tensor, batch_size: int | float | Tensor | None) -> None:
        if value.numel() != 1:
            raise _not_one_element(entry.name, value)
        # A copy: the tensor may be a buffer, or be added to in place (`loss += penalty`) before it is read.
        value = value.detach().clone()
        entry.last = value
        if entry.on_epoch:
            if batch_size is None:
                batch_size = self.items or self._count_items(entry)
            elif isinstance(batch_size, Tensor):
                batch_size = float(batch_size) if batch_size.is_cpu else batch_size.detach().clone()
            entry.add_on_device(value, batch_size)

    def _number(self, entry: Entry, value: Any) -> float | None:
        """Convert a value of another type to a float; return None for a metric, which holds its own state."""
        if is_metric(value):
            entry.metric = value
            if entry.on_step:
                entry.last = value._forward_cache
            return None
        try:
            if not isinstance(value, (str, bytes)):
                return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
        hint = "; log a MetricCollection with log_dict" if is_collection(value) else ""
        raise MetricError(
            f"log({entry.name!r}, ...) got a {type(value).__name__}; "
            f"a value must be a number, a tensor with one element, or a torchmetrics Metric{hint}."
        )

    def _entry(self, name: str, key: str, flags: Flags, old: Entry | None) -> Entry:
        """Return the entry for a new name, or for one that was called with other arguments than before."""
        if not isinstance(name, str):
            raise ConfigurationError(f"log({name!r}, ...): a name must be a string.")
        fx = _reduction(name, flags.reduce_fx)
        if old is not None:
            if old.flags._replace(reduce_fx=old.fx) == flags._replace(reduce_fx=fx):
                old.flags = flags
                return old
            raise ConfigurationError(
                f"log({name!r}, ...) was called with other arguments before in this epoch: the arguments "
                "prog_bar, logger, on_step, on_epoch and reduce_fx of a name must stay the same; use another name."
            )
        on_step, on_epoch = self._when(name, flags.on_step, flags.on_epoch)
        if self._loader is not None and _LOADER_SUFFIX in name and key != name:
            raise ConfigurationError(
                f"log({name!r}, ...): the number of the loader is added automatically; leave it out of the name, or "
                "pass add_dataloader_idx=False."
            )
        suffix = key[len(name) :]
        entry = self._entries[key] = Entry(name, flags, fx, on_step, on_epoch, self._loader, suffix)
        self.mark = self._mark()
        return entry

    def epoch_names(self) -> list[str]:
        """Return the names that every rank with data must have logged by the end of the epoch."""
        return [entry.epoch_name for entry in self if entry.on_epoch and not entry.rank_zero_only]

    def _mark(self) -> int:
        return sum(zlib.crc32(name.encode()) for name in self.epoch_names()) & _MARK

    def _when(self, name: str, on_step: bool | None, on_epoch: bool | None) -> tuple[bool, bool]:
        stepwise = self._training and self.in_step
        on_step = stepwise if on_step is None else on_step
        on_epoch = not stepwise if on_epoch is None else on_epoch
        if on_step and not self.in_step:
            raise ConfigurationError(f"log({name!r}, on_step=True) in an epoch hook: use on_epoch=True there.")
        if not on_step and not on_epoch:
            raise ConfigurationError(f"log({name!r}, ...) with on_step and on_epoch both False records nothing.")
        return bool(on_step), bool(on_epoch)

    # ---- reading --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Entry]:
        for scope in self._scopes.values():
            yield from scope.values()

    def step_values(self, wanted: str) -> dict[str, Any]:
        """Return the latest step values of the entries whose attribute ``wanted`` is true, as numbers or tensors."""
        return {
            entry.step_name: entry.last
            for entry in self._scopes[True].values()
            if entry.on_step and entry.last is not None and getattr(entry, wanted)
        }

    def current(self) -> dict[str, Any]:
        """Return the latest step values for callbacks, each under its step name and its plain name.

        As in Lightning, callbacks do not see the step values of an evaluation.
        """
        if not self._training:
            return {}
        values = self.step_values("on_step")
        values.update({e.plain_name: e.last for e in self if e.on_step and e.on_epoch and e.last is not None})
        return values

    def reduce(self, more: bool = False) -> tuple[dict[Entry, Tensor], bool]:
        """Return the epoch values of names logged since the last call, and whether any rank has ``more`` to log.

        Resets the entries; ``finish`` resets the metrics. Collective: one exchange for all names.

        Raises:
            MetricError: ranks that had data logged different names, or a metric has no single value.
        """
        entries = {entry.epoch_name: entry for entry in self if entry.on_epoch}
        read_devices(entries.values())
        self._used_metrics += [entry.metric for entry in entries.values() if entry.metric is not None]
        for scope in self._scopes.values():
            scope.clear()
        self.mark = 0
        fed = self.fed | ({None} if self.batches else set())
        return exchange(self.world, self.stage, entries, fed, more, self._frame_size)

    def finish(self) -> None:
        """Start a new epoch: reset the metrics that were logged."""
        for metric in self._used_metrics:
            metric.reset()
        self._used_metrics = []
        self.batches = 0
        self.fed = set()
        self.batch = None
        self.items = None

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the values that this rank has recorded in the epoch so far, including the module's metrics."""
        read_devices(self)
        places = {id(part): name for name, part in self._module.named_modules()} if self._module is not None else {}
        return {
            "batches": self.batches,
            "entries": [
                {
                    "name": entry.name,
                    "flags": list(entry.flags._replace(reduce_fx=entry.fx)),
                    "when": [entry.on_step, entry.on_epoch],
                    "local": list(entry.local()[1:]),
                    "in_step": in_step,
                    "last": None if entry.last is None else float(entry.last),
                    "metric": None if entry.metric is None else places[id(entry.metric)],
                }
                for in_step, scope in self._scopes.items()
                for entry in scope.values()
                # A metric outside the module has no name by which it could be restored.
                if entry.metric is None or id(entry.metric) in places
            ],
            "metrics": metric_states(self._module) if self._module is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue an epoch from a ``state_dict``."""
        self.load_state_dicts([state])

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue an epoch from the ``state_dict`` of one rank or several, whose data this rank continues."""
        self.batches = sum(state["batches"] for state in states)
        for state in states:
            for item in state["entries"]:
                self._restore_entry(item)
        self.mark = self._mark()
        if self._module is not None:
            load_metric_states(self._module, *[state["metrics"] for state in states])

    def _restore_entry(self, item: Mapping[str, Any]) -> None:
        flags = Flags(*item["flags"])
        scope = self._scopes[item.get("in_step", True)]
        entry = scope.setdefault(item["name"], Entry(item["name"], flags, flags.reduce_fx, *item["when"]))
        entry.restore(*item["local"])
        entry.last = item.get("last") if entry.last is None else entry.last
        if item.get("metric") is not None and self._module is not None:
            entry.metric = self._module.get_submodule(item["metric"])


class NoLog:
    """Replaces a ``MetricLog`` in hooks where logging is an error."""

    def __init__(self, where: str, instead: str) -> None:
        self._where = where
        self._instead = instead

    def log(self, name: str, *arguments: Any, **options: Any) -> None:
        """Refuse a value.

        Raises:
            MetricError: always.
        """
        raise MetricError(f"log({name!r}, ...) in {self._where}, where nothing is recorded: {self._instead}.")


def _reduction(name: str, given: Any) -> str:
    fx = given.lower() if isinstance(given, str) else given
    if isinstance(fx, Hashable):
        fx = _EQUIVALENTS.get(fx, fx)
    if fx not in _REDUCTIONS:
        raise ConfigurationError(
            f"log({name!r}, reduce_fx={given!r}) is not known.{did_you_mean(str(fx), _REDUCTIONS)} "
            f"Known: {', '.join(_REDUCTIONS)}; for anything else log a torchmetrics Metric."
        )
    return str(fx)


def _not_one_element(name: str, value: Tensor) -> MetricError:
    return MetricError(
        f"log({name!r}, ...) got a tensor of shape {tuple(value.shape)}; a value must have one element: "
        "reduce it first, with .mean() for example."
    )


def batch_items(batch: Any) -> int:
    """Return how many items a batch holds: the first dim of its first tensor, else the length of its first list of
    strings, else 1."""
    if (batch.__class__ is list or batch.__class__ is tuple) and batch and batch[0].__class__ is Tensor:
        first: Tensor = batch[0]
        return first.shape[0] if first.dim() else 1
    texts: list[int] = []
    found = next(_sizes(batch, texts), None)
    return found if found is not None else texts[0] if texts else 1


def _sizes(batch: Any, texts: list[int]) -> Iterator[int]:
    """Yield the first dim of each tensor or array; note the lengths of lists of strings in ``texts``."""
    if isinstance(batch, Tensor) or (hasattr(batch, "shape") and hasattr(batch, "dtype")):
        yield batch.shape[0] if len(batch.shape) else 1
    elif isinstance(batch, (str, bytes)):
        return
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _sizes(value, texts)
    elif isinstance(batch, Iterable) and not isinstance(batch, Iterator):
        items = list(batch)
        if items and isinstance(items[0], (str, bytes)):
            texts.append(len(items))
        for value in items:
            yield from _sizes(value, texts)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _sizes(getattr(batch, field.name), texts)
