"""Reduction of logged values at the end of an epoch: one exchange of all names, the same result on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.errors import MetricError, did_you_mean
from ..distributed.object_frames import FrameSize
from ..distributed.world import World
from .metric_entry import Entry, Flags, Part, combine
from .torchmetrics_state import compute_over_ranks, packed_states


@dataclass
class Contribution:
    """The data that one rank sends in the exchange. Its fields are compact, so that it fits into one message."""

    fed: set[int | None]
    """The loaders from which this rank had data (None: any): it must log the same names in them as other ranks."""
    more: bool
    """Whether hooks of this rank may log more values, which requires another exchange."""
    kinds: dict[str, tuple[Any, ...]]
    """For each name, the settings that a rank which did not log it needs."""
    values: dict[str, Part]
    metrics: dict[str, list[Any]]

    def __reduce__(self) -> tuple[Any, ...]:
        return Contribution, (self.fed, self.more, self.kinds, self.values, self.metrics)


def exchange(
    world: World, stage: str, entries: Mapping[str, Entry], fed: set[int | None], more: bool, size: FrameSize
) -> tuple[dict[Entry, Tensor], bool]:
    """Return the value of each name over all ranks, and whether any rank has ``more`` to log. Collective.

    Raises:
        MetricError: ranks that had data logged different names or reductions, or a metric has no value. Raised on all
            ranks.
    """
    if world.size == 1:
        return {entry: _value(key, entry, []) for key, entry in entries.items()}, more
    counts = world.counts_data
    mine = _contribution(entries, fed, more) if counts else Contribution(set(), more, {}, {}, {})
    gathered = world.all_gather_object(mine, size)
    _check(stage, gathered)
    names = dict.fromkeys(name for part in gathered for name in part.kinds)
    known = {name: entries.get(name) or _placeholder(name, gathered) for name in names}
    for name, entry in known.items():
        entry.loader = _first_loader(name, gathered)
    values = {name: _number(_parts_of(name, gathered)) for name in names if not _is_metric(name, gathered)}
    values |= _metric_values(world, entries, gathered, [name for name in names if name not in values])
    return {known[name]: values[name] for name in names}, any(part.more for part in gathered)


def _contribution(entries: Mapping[str, Entry], fed: set[int | None], more: bool) -> Contribution:
    # Each kind is pickled once: most names are of the same kind.
    shared: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    kinds = {key: shared.setdefault(kind := _kind(entry), kind) for key, entry in entries.items()}
    plain = {key: entry.local() for key, entry in entries.items() if entry.metric is None}
    metrics = {key: packed_states(entry.metric) for key, entry in entries.items() if entry.metric is not None}
    return Contribution(fed, more, kinds, plain, metrics)


def _kind(entry: Entry) -> tuple[Any, ...]:
    fx = entry.fx if entry.metric is None else type(entry.metric).__name__
    return fx, entry.prog_bar, entry.logger, entry.on_step, entry.rank_zero_only, entry.loader, entry.suffix


def _placeholder(key: str, gathered: list[Contribution]) -> Entry:
    """Return an entry for a name that this rank did not log because it had no data."""
    kind = next(part.kinds[key] for part in gathered if key in part.kinds)
    fx, prog_bar, logger, on_step, rank_zero_only, loader, suffix = kind
    flags = Flags(prog_bar, logger, on_step, True, fx, rank_zero_only)
    return Entry(_name(key, kind), flags, fx, on_step, True, loader, suffix)


def _name(key: str, kind: tuple[Any, ...]) -> str:
    """Return the name that was given to ``log``."""
    _, _, _, on_step, _, _, suffix = kind
    name = key.removesuffix(suffix)
    return name.removesuffix("_epoch") if on_step else name


def _first_loader(name: str, gathered: list[Contribution]) -> int | None:
    """Return the loader that a name belongs to; a rank without data in it may have logged the name first in a later
    one."""
    loaders = [part.kinds[name][5] for part in gathered if name in part.kinds]
    return None if None in loaders else min(loaders)


def _check(stage: str, gathered: list[Contribution]) -> None:
    """Compare the names logged by ranks that had data from the same loader, except names for rank 0 only."""
    expected: dict[str, int] = {}
    for rank, part in enumerate(gathered):
        if None in part.fed:
            for name in part.kinds:
                expected.setdefault(name, rank)
    for name, other in sorted(expected.items()):
        kind = gathered[other].kinds[name]
        fx, loader, rank_zero_only = kind[0], kind[5], kind[4]
        for rank, part in enumerate(gathered):
            if rank_zero_only or loader not in part.fed:
                continue
            if name not in part.kinds:
                raise _missing(stage, _name(name, kind), (rank, part), (other, gathered[other]))
            if part.kinds[name][0] != fx:
                raise MetricError(
                    f"rank {rank} logged {_name(name, kind)!r} in {stage} as {part.kinds[name][0]!r}, rank {other} "
                    f"as {fx!r}; every rank must reduce a name in the same way."
                )


def _missing(stage: str, name: str, rank: tuple[int, Contribution], other: tuple[int, Contribution]) -> MetricError:
    own = set(rank[1].kinds) - set(other[1].kinds)
    return MetricError(
        f"rank {rank[0]} did not log {name!r} in {stage}, rank {other[0]} did; every rank that has data must log the "
        f"same names in an epoch.{did_you_mean(name, own)}"
    )


def _is_metric(name: str, gathered: list[Contribution]) -> bool:
    return any(name in part.metrics for part in gathered)


def _parts_of(name: str, gathered: list[Contribution]) -> list[Part]:
    return [part.values[name] for part in gathered if name in part.values]


def _value(key: str, entry: Entry, ranks: list[Any]) -> Tensor:
    return _number([entry.local()]) if entry.metric is None else compute_over_ranks(key, entry.metric, ranks)


def _number(parts: list[Part]) -> Tensor:
    default = torch.get_default_dtype()
    # Lightning's rule: a value is of the default dtype, but never of a half precision.
    return torch.tensor(combine(parts), dtype=default if default.itemsize >= 4 else torch.float32)


def _metric_values(
    world: World, entries: Mapping[str, Entry], gathered: list[Contribution], names: list[str]
) -> dict[str, Tensor]:
    """Compute metrics over the states of all ranks on each rank that has them, and send the values to the other
    ranks."""
    sources = {name: next(r for r, part in enumerate(gathered) if name in part.metrics) for name in names}
    everywhere = all(name in part.metrics for part in gathered for name in names)
    computed: dict[str, Tensor | MetricError] = {}
    for name in names:
        if everywhere or sources[name] == world.rank:
            states = [part.metrics[name] for part in gathered if name in part.metrics]
            computed[name] = _computed(name, entries[name], states)
    if not everywhere:
        for source in sorted(set(sources.values())):
            computed |= world.broadcast_object(dict(computed) if source == world.rank else {}, src=source)
    values: dict[str, Tensor] = {}
    for name, value in computed.items():
        if isinstance(value, MetricError):
            raise value
        values[name] = value
    return values


def _computed(name: str, entry: Entry, states: list[Any]) -> Tensor | MetricError:
    """Compute a metric; return an error instead of raising it, so that no rank is left waiting for the others."""
    try:
        return compute_over_ranks(name, entry.metric, states)
    except MetricError as error:
        return error
    except Exception as error:
        return MetricError(f"{type(entry.metric).__name__}, logged as {name!r}, failed: {error}")
