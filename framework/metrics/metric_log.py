"""``MetricLog``: the values that ``self.log`` records. They stay on their device until they are read.

A value logged for each step keeps only its newest. A value logged for each epoch adds to an exact weighted sum; at the
epoch's end the sums of all names travel in one exchange, torchmetrics states included, and every rank has the same
result. In a step there is neither a collective nor a synchronisation with a device.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ..core.errors import ConfigurationError, MetricError
from ..distributed.object_frames import FrameSize
from ..distributed.world import World
from .batch_items import batch_items
from .epoch_reduction import exchange
from .log_arguments import kept_for, reduction_of
from .logged_value import NO_VIEW, not_one_element, view_of
from .metric_entry import Entry, Flags, read_devices
from .torchmetrics_state import is_collection, is_metric, load_metric_states, metric_states

_LOADER_SUFFIX = "/dataloader_idx_"
_MARK = (1 << 20) - 1


class MetricLog:
    """The logged values of one stage of a run (``"train"``, ``"validate"``, ``"test"``).

    ``in_step`` says whether a step is running, which decides the defaults; the loop sets it once for each epoch, and
    ``batch`` for each micro-batch, from which the weight of an epoch's mean is read when it is needed. ``batches``
    counts them, and ``fed`` holds the numbers of the loaders that had one for this rank, where there are several.
    """

    def __init__(self, stage: str, world: World, module: nn.Module | None = None) -> None:
        """``module`` is the one whose metrics are part of the state."""
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
        self._view = NO_VIEW
        self._newest: Callable[[], Any] = NO_VIEW[0]
        self.mark = 0
        """Tells the names apart that are logged for the epoch's end by all ranks; below 2**20."""

    @property
    def in_step(self) -> bool:
        """Whether values belong to a step, or to a hook of the epoch."""
        return self._entries is self._scopes[True]

    @in_step.setter
    def in_step(self, value: bool) -> None:
        self._entries = self._scopes[value]
        # Values of the epoch weigh the same on every rank, so the last batch must not count; this also releases it.
        self.batch = None
        self.items = None

    @property
    def loader(self) -> int | None:
        """The number of the evaluation loader, where there are several: names get it as a suffix."""
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

        The first call of a name fixes how it is reduced and where it goes.
        """
        # This runs once for each value of each step, so it decides by identity wherever it can, and calls nothing that
        # a plain tensor or float with the arguments of the last time does not need.
        key = name + self._suffix if self._suffix and add_dataloader_idx else name
        entry = self._entries.get(key)
        # A plain tuple equals the named one of the entry, and takes a fraction of the time to make.
        flags = (prog_bar, logger, on_step, on_epoch, reduce_fx, rank_zero_only)
        if entry is None or entry.flags != flags:
            entry = self._entry(name, key, Flags(*flags), entry)
            if entry is None:
                return
        number: float | None
        if value.__class__ is Tensor:
            # Several names often log one tensor. From the third on its memory is read, at half the price of ``item()``.
            # Its value cannot be remembered instead: it may have changed since the last name, and not all changes show.
            seen, address, cell = self._view
            if seen() is value and value.data_ptr() == address:
                number = cell.value
            else:
                number = self._read(entry, value, batch_size)
        elif value.__class__ is float:
            number = value
        else:
            number = self._number(entry, value, batch_size)
        if number is None:
            return
        entry.last = number
        if entry.on_epoch:
            if batch_size is None:
                entry.add(number, self.items or self._count_items(entry))
            else:
                _add_weighted(entry, number, batch_size)

    def _read(self, entry: Entry, value: Tensor, batch_size: int | float | Tensor | None) -> float | None:
        """Return the element of a tensor on the CPU; None for one on a device, whose copy is kept there."""
        if not value.is_cpu:
            self._keep_on_device(entry, value, batch_size)
            return None
        # A number at once: on a CPU that waits for nothing, and the tensor may change in place later.
        try:
            number: float = value.item()
        except RuntimeError:
            raise not_one_element(entry.name, value) from None
        if number.__class__ is not float:
            return self._number(entry, number, batch_size)
        # A weak reference: a strong one would keep the graph of a loss alive.
        if self._newest() is value:
            self._view = view_of(value)
        else:
            self._newest = ref(value)
        return number

    def _count_items(self, entry: Entry) -> int:
        """Return the weight of the batch: its items, counted when a mean first needs them."""
        if self.items is None and entry.fx == "mean":
            self.items = batch_items(self.batch)
        return self.items or 0

    def _keep_on_device(self, entry: Entry, value: Tensor, batch_size: int | float | Tensor | None) -> None:
        if value.numel() != 1:
            raise not_one_element(entry.name, value)
        # A copy: the tensor may be a buffer, or be added to in place (`loss += penalty`) before anybody reads it.
        value = value.detach().clone()
        entry.last = value
        if entry.on_epoch:
            if batch_size is None:
                batch_size = self.items or self._count_items(entry)
            elif isinstance(batch_size, Tensor):
                batch_size = float(batch_size) if batch_size.is_cpu else batch_size.detach().clone()
            entry.add_on_device(value, batch_size)

    def _number(self, entry: Entry, value: Any, batch_size: int | float | Tensor | None) -> float | None:
        """Return a value of another type as a float; None for a metric or a tensor on a device."""
        if isinstance(value, Tensor):
            return self._read(entry, value, batch_size)
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

    def _entry(self, name: str, key: str, flags: Flags, old: Entry | None) -> Entry | None:
        """Return the entry of a name that is new, or whose arguments are written differently than before.

        None on other ranks than 0 where ``rank_zero_only`` is given: they log nothing.
        """
        if flags.rank_zero_only and not self._speaks:
            return None
        if not isinstance(name, str):
            raise ConfigurationError(f"log({name!r}, ...): a name must be a string.")
        fx = reduction_of(name, flags.reduce_fx)
        if old is not None:
            if old.flags._replace(reduce_fx=old.fx) == flags._replace(reduce_fx=fx):
                old.flags = flags
                return old
            raise ConfigurationError(
                f"log({name!r}, ...) was called with other arguments before in this epoch: the arguments "
                "prog_bar, logger, on_step, on_epoch and reduce_fx of a name must stay the same; use another name."
            )
        on_step, on_epoch = kept_for(name, flags.on_step, flags.on_epoch, self._training, self.in_step)
        if self._loader is not None and _LOADER_SUFFIX in name and key != name:
            raise ConfigurationError(
                f"log({name!r}, ...): the number of the loader is added by itself; leave it out of the name, or say "
                "add_dataloader_idx=False."
            )
        suffix = key[len(name) :]
        entry = self._entries[key] = Entry(name, flags, fx, on_step, on_epoch, self._loader, suffix)
        self.mark = self._mark()
        return entry

    def epoch_names(self) -> list[str]:
        """Return the names that every rank with data must have logged by the epoch's end."""
        return [entry.epoch_name for entry in self if entry.on_epoch and not entry.rank_zero_only]

    def _mark(self) -> int:
        return sum(zlib.crc32(name.encode()) for name in self.epoch_names()) & _MARK

    # ---- reading --------------------------------------------------------------------------------------------------

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
        """Return the newest step values for callbacks: under the step's name, and under the plain one.

        As in Lightning callbacks see no step values of an evaluation.
        """
        if not self._training:
            return {}
        values = self.step_values("on_step")
        values.update({e.plain_name: e.last for e in self if e.on_step and e.on_epoch and e.last is not None})
        return values

    def reduce(self, more: bool = False) -> tuple[dict[Entry, Tensor], bool]:
        """Return the epoch's values of what was logged since the last call, and whether any rank has ``more`` to log.

        Entries start again; ``finish`` resets the metrics. Collective: one exchange for all names.

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
        """Start a new epoch: metrics that were logged are reset."""
        for metric in self._used_metrics:
            metric.reset()
        self._used_metrics = []
        self.batches = 0
        self.fed = set()
        self.batch = None
        self.items = None

    # ---- state ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank has recorded in the epoch so far, the metrics of the module included."""
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
                # A metric outside the module has no name by which it could be found again.
                if entry.metric is None or id(entry.metric) in places
            ],
            "metrics": metric_states(self._module) if self._module is not None else {},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue an epoch from what ``state_dict`` returned."""
        self.load_state_dicts([state])

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue an epoch from what ``state_dict`` returned on one rank or several, whose part is this one's now."""
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


def _add_weighted(entry: Entry, number: float, batch_size: int | float | Tensor) -> None:
    """Add a number with the weight that the user gave, which may be on a device."""
    if isinstance(batch_size, Tensor) and not batch_size.is_cpu:
        entry.add_on_device(number, batch_size.detach().clone())
    else:
        entry.add(number, float(batch_size))
