"""``MetricLog``: the values that ``self.log`` records. They stay on their device until they are read.

Of a name logged per step only the latest value is stored. A name logged per epoch is added to an exact weighted sum. At
the end of the epoch the sums of all names, torchmetrics states included, are exchanged at once, and every rank has the
same result. A step contains neither a collective nor a device synchronization.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..core.arguments import keywords_of, unknown_argument
from ..core.errors import ConfigurationError
from ..distributed.object_frames import FrameSize
from ..distributed.world import World
from .epoch_reduction import exchange
from .log_arguments import batch_items, kept_for, not_one_element, number_of, reduction_of
from .metric_entry import Entry, Flags, Scope, read_devices, read_numbers
from .torchmetrics_state import is_metric, load_metric_states, metric_states

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
            entry.metric = module.get_submodule(item["metric"])
    if module is not None:
        load_metric_states(module, *[state["metrics"] for state in states])


# Takes the place of the entry of a name that was not logged yet: no arguments are the same as these.
_NEW = Entry("", Flags(False, True, None, None, object(), False), "", False, False)
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
        self.items: float | None = None
        self.batches = 0
        self.fed: set[int | None] = set()
        self._module = module
        self._loader: int | None = None
        self._suffix = ""
        self._scopes = {True: Scope(), False: Scope()}
        self._use(self._scopes[False])
        self._training = stage == "train"
        self._speaks = world.rank == 0
        self._used_metrics: list[Any] = []
        self._frame_size = FrameSize()
        self._shown: dict[str, Any] = {}
        # In a build of torch without an accelerator tensors need not be asked where they are, a tenth of ``log``.
        self._host_only = torch.accelerator.current_accelerator() is None
        self.mark = 0
        """A hash, below 2**20, of the names that all ranks log for the end of the epoch."""

    @property
    def in_step(self) -> bool:
        """Whether values belong to a step rather than to an epoch hook."""
        return self._scope is self._scopes[True]

    @in_step.setter
    def in_step(self, value: bool) -> None:
        self._use(self._scopes[value])
        # Epoch values have the same weight on every rank, so the last batch must not count; this also releases it.
        self.batch = self.items = None

    def _use(self, scope: Scope) -> None:
        # ``log`` reads the two attributes of the scope for each value.
        self._scope, self._entries, self._latest = scope, scope.entries, scope.latest

    @property
    def loader(self) -> int | None:
        """The number of the evaluation loader if there are several: it is a suffix of names."""
        return self._loader

    @loader.setter
    def loader(self, value: int | None) -> None:
        self._loader = value
        self._suffix = "" if value is None else f"{_LOADER_SUFFIX}{value}"

    # ---- writing --------------------------------------------------------------------------------------------------

    def begin_batch(self, batch: Any, share: float = 1.0) -> None:
        """Weight the values of the following calls by a batch, of which this rank has a ``share``, and count it."""
        self.batch, self.items = batch, None if share == 1.0 else batch_items(batch) * share
        self.batches += 1

    def drop_batch(self) -> None:
        """Do not count the batch: this rank need not log the names that others log with a loss."""
        self.batches -= 1

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
        **unknown: NoReturn,
    ) -> None:
        """Record a value; ``TrainModule.log`` is this method while a run is in progress, with the same arguments.

        The first call for a name fixes its reduction and its destinations.
        """
        # This runs once for each value of each step: each attribute and each call below is paid a hundred times by a
        # module that logs a hundred values. Most of what is left is ``item()``.
        key = self._key(name, add_dataloader_idx) if self._suffix else name
        try:  # Faster than ``get``.
            entry = self._entries[key]
        except KeyError:
            entry = _NEW
        # Tuples are compared only for names with other arguments than the defaults. These are spelled as constants,
        # which need no look-up. A plain tuple equals the named one, and takes a fraction of the time to make.
        if (
            prog_bar is not False or logger is not True or on_step is not None or on_epoch is not None
            or reduce_fx != "mean" or rank_zero_only is not False or unknown or not entry.has_default_flags
        ) and entry.flags != (prog_bar, logger, on_step, on_epoch, reduce_fx, rank_zero_only, *unknown):  # fmt: skip
            flags = Flags(prog_bar, logger, on_step, on_epoch, reduce_fx, rank_zero_only)
            known = self._entry(name, key, flags, entry, unknown)
            if known is None:
                return
            entry = known
        if type(value) is not float:
            if type(value) is Tensor and (self._host_only or value.is_cpu):
                # Read at once: the tensor may change in place later. Two names that log one tensor do not share the
                # read either: its ``_version`` counts neither ``all_reduce`` nor ``tensor.data.add_`` in between.
                try:  # Where nothing is raised this is free; ``contextlib.suppress`` is a call.  # noqa: SIM105
                    value = value.item()
                except RuntimeError:
                    pass  # ``number_of`` finds out why: the tensor has several elements, or no data.
            if type(value) is not float:
                self._log_other(key, value, batch_size)
                return
        self._latest[entry.index] = value
        if entry.on_epoch:
            if batch_size is None:
                entry.add(value, self.items or self._count_items(entry))
            else:
                entry.add_weighted(value, batch_size)

    def _count_items(self, entry: Entry) -> float:
        """Return the weight of the batch: its number of items, counted when first needed for a mean."""
        if self.items is None and entry.fx == "mean":
            self.items = batch_items(self.batch)
        return self.items or 0

    def _keep_on_device(self, key: str, value: Tensor, batch_size: int | float | Tensor | None) -> None:
        entry = self._entries[key]
        if value.numel() != 1:
            raise not_one_element(entry.name, value)
        # A copy: the tensor may be a buffer, or be added to in place (`loss += penalty`) before it is read.
        self._latest[entry.index] = value = value.detach().clone()
        if entry.on_epoch:
            if batch_size is None:
                batch_size = self._count_items(entry)
            elif isinstance(batch_size, Tensor):
                batch_size = float(batch_size) if batch_size.is_cpu else batch_size.detach().clone()
            entry.add_on_device(value, batch_size)

    def _log_other(self, key: str, value: Any, batch_size: int | float | Tensor | None) -> None:
        """Record a torchmetrics ``Metric``, a tensor on a device, or a number that is not a Python float."""
        entry = self._entries[key]
        if isinstance(value, Tensor) and not value.is_cpu:
            self._keep_on_device(key, value, batch_size)
        elif is_metric(value):
            entry.metric = value
            if entry.on_step:
                self._latest[entry.index] = value._forward_cache
        else:
            self._latest[entry.index] = value = number_of(entry.name, value)
            if not entry.on_epoch:
                return
            if batch_size is None:
                entry.add(value, self._count_items(entry))
            else:
                entry.add_weighted(value, batch_size)

    def _key(self, name: str, add_dataloader_idx: bool) -> str:
        """Return the name with the suffix of the evaluation loader."""
        return name + self._suffix if add_dataloader_idx else name

    def _entry(self, name: str, key: str, flags: Flags, old: Entry, unknown: Mapping[str, Any]) -> Entry | None:
        """Return the entry of a name that is new, or whose arguments are written differently than before.

        None on other ranks than 0 where ``rank_zero_only`` is given: they log nothing.
        """
        for given, value in unknown.items():
            raise unknown_argument("self.log", given, value, keywords_of(MetricLog.log))
        if flags.rank_zero_only and not self._speaks:
            return None
        if not isinstance(name, str):
            raise ConfigurationError(f"log({name!r}, ...): a name must be a string.")
        fx = reduction_of(name, flags.reduce_fx)
        if old is not _NEW:
            if old.flags._replace(reduce_fx=old.fx) == flags._replace(reduce_fx=fx):
                return old.written(flags)
            raise ConfigurationError(
                f"log({name!r}, ...) was called with other arguments before in this epoch: the arguments "
                "prog_bar, logger, on_step, on_epoch and reduce_fx of a name must stay the same; use another name."
            )
        on_step, on_epoch = kept_for(name, flags.on_step, flags.on_epoch, self._training, self.in_step)
        if self._loader is not None and _LOADER_SUFFIX in name and key != name:
            raise ConfigurationError(
                f"log({name!r}, ...): the number of the loader is added automatically; leave it out of the name, or "
                "pass add_dataloader_idx=False."
            )
        suffix = key[len(name) :]
        entry = self._scope.add(key, Entry(name, flags, fx, on_step, on_epoch, self._loader, suffix))
        self.mark = self._mark()
        return entry

    def epoch_names(self) -> list[str]:
        """Return the names that every rank with data must have logged by the end of the epoch."""
        return [entry.epoch_name for entry in self if entry.on_epoch and not entry.rank_zero_only]

    def _mark(self) -> int:
        return sum(zlib.crc32(name.encode()) for name in self.epoch_names()) & _MARK

    # ---- reading --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Entry]:
        for scope in self._scopes.values():
            yield from scope.entries.values()

    def step_values(self, wanted: str) -> dict[str, Any]:
        """Return the latest step values of the entries whose attribute ``wanted`` is true, as numbers or tensors."""
        return self._scopes[True].step_values(wanted)

    def current(self) -> dict[str, Any]:
        """Return the latest step values for callbacks, each under its step name and its plain name.

        As in Lightning, callbacks do not see the step values of an evaluation.
        """
        if not self._training:
            return {}
        values = self.step_values("on_step")
        for scope in self._scopes.values():
            for entry in scope.entries.values():
                if entry.on_step and entry.on_epoch and (value := scope.latest[entry.index]) is not None:
                    values[entry.plain_name] = value
        return values | self._shown

    def show(self, values: dict[str, Any]) -> None:
        """Let callbacks see the step values of a rank that logs for this one too, until the end of the epoch."""
        self._shown = values

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
        self.mark, self._shown = 0, {}
        fed = self.fed | ({None} if self.batches else set())
        return exchange(self.world, self.stage, entries, fed, more, self._frame_size)

    def finish(self) -> None:
        """Start a new epoch: reset the metrics that were logged."""
        for metric in self._used_metrics:
            metric.reset()
        self._used_metrics = []
        self.batches = 0
        self.fed = set()
        self.batch = self.items = None

    # ---- state ----------------------------------------------------------------------------------------------------

    def record(self) -> LogRecord:
        """Return a record of the values that this rank has logged in the epoch so far, without reading a device."""
        return LogRecord(self._scopes, self._module, self.batches)

    def go_back(self, record: LogRecord) -> None:
        """Forget what was logged since a record of this log was made."""
        self.batches = record.put_back(self._scopes)
        self.mark = self._mark()

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue an epoch from the records of one rank or several, whose data this rank continues."""
        self.batches = sum(state["batches"] for state in states)
        load_entries(self._scopes, self._module, states)
        self.mark = self._mark()
