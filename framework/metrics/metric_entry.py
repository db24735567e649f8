"""``Entry``: the values of one logged name. Tensors stay on their device until their values are read.

Sums are exact, so that a mean is the same for any number of ranks and any order of addition. A sum is stored as a few
floats (partials) whose exact total equals that of all values; it is rounded once, when read. ``math.fsum`` gives the
correctly rounded sum; the rounding error is again the correctly rounded sum of the rest, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class HostNumbers:
    """Pairs of numbers, some of them tensors, that are being copied to the host.

    Values are stacked, one tensor for each device and dtype; from CUDA they are copied to pinned memory asynchronously,
    so that a later read need not wait.
    """

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._numbers: list[Any] = [number for pair in pairs for number in pair]
        self._copies: list[tuple[list[int], Tensor, Any]] = []
        places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for place, number in enumerate(self._numbers):
            if isinstance(number, Tensor):
                places.setdefault((number.device, number.dtype), []).append(place)
        for (device, _), group in places.items():
            stacked = torch.stack([self._numbers[place].reshape(()) for place in group])
            event = None
            if device.type == "cuda":
                stacked = stacked.to("cpu", non_blocking=True)
                event = torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True))
            self._copies.append((group, stacked, event))
            for place in group:
                self._numbers[place] = None

    def is_on_host(self) -> bool:
        """Whether ``read`` returns without waiting."""
        return all(event is not None and event.query() for _, _, event in self._copies)

    def read(self) -> list[tuple[float, float]]:
        """Return the pairs as numbers; waits for the device if needed."""
        for group, stacked, event in self._copies:
            if event is not None:
                event.synchronize()
            for place, number in zip(group, stacked.tolist(), strict=True):
                self._numbers[place] = float(number)
        return list(zip(self._numbers[::2], self._numbers[1::2], strict=True))


def read_numbers(values: Sequence[Any]) -> list[float | None]:
    """Return values as numbers, None where there is none; copies those on a device with one synchronization."""
    numbers = [value for value in values if value is not None]
    found = iter(HostNumbers([(number, 0.0) for number in numbers]).read())
    return [None if value is None else float(next(found)[0]) for value in values]


def partials_of(values: list[float]) -> list[float]:
    """Return a few floats with exactly the sum of ``values``, largest first; a single float if the sum is not finite.

    Sums that exceed the largest double are infinite.
    """
    if (rounded := sum(values)) - rounded != 0.0:
        return [rounded]
    partials: list[float] = []
    rest = [*values]
    try:
        # Each is at most half a unit in the last place of the one before, so there are seldom more than two.
        while part := math.fsum(rest):
            partials.append(part)
            rest.append(-part)
    except OverflowError:
        return [rounded]
    return partials


def total_of(values: list[float]) -> float:
    """Return the exact sum of ``values``, rounded once."""
    if (rounded := sum(values)) - rounded != 0.0:
        return rounded
    try:
        return math.fsum(values)
    except OverflowError:
        return rounded


_COMPACT_AT = 1024
_PARK_AT = 256


class Flags(NamedTuple):
    """The arguments of ``log`` that must stay the same for a name during an epoch, as the user gave them."""

    prog_bar: bool
    logger: bool
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: Any
    rank_zero_only: bool


_DEFAULT_FLAGS = Flags(False, True, None, None, "mean", False)

Part = tuple[str, list[float], list[float]]
"""One rank's part of a name: the reduction, numbers, and for a mean the partial sums of its weight."""


class Entry:
    """A logged name: its reduction, its destinations, and its sums over the epoch so far."""

    __slots__ = ("_parked", "_waiting", "extreme", "flags", "fx", "has_default_flags", "index", "loader", "metric",
                 "name", "on_epoch", "on_step", "suffix", "values", "weights")  # fmt: skip

    def __init__(
        self,
        name: str,
        flags: Flags,
        fx: str,
        on_step: bool,
        on_epoch: bool,
        loader: int | None = None,
        suffix: str = "",
    ) -> None:
        self.name = name
        self.written(flags)
        self.fx = fx
        self.on_step = on_step
        self.on_epoch = on_epoch
        self.loader = loader
        self.suffix = suffix
        self.index = 0
        """The position of the newest value in the scope."""
        self.metric: Any = None
        """A torchmetrics ``Metric`` from which the epoch value is taken, and not from the sums."""
        self.values: list[float] = []
        self.weights: list[float] = []
        self.extreme: float | None = None
        self._waiting: list[tuple[Any, Any]] = []
        self._parked: list[HostNumbers] = []

    def written(self, flags: Flags) -> Entry:
        """Set the arguments as they are written now, which those of the next call are compared with."""
        self.flags = flags
        self.has_default_flags = flags == _DEFAULT_FLAGS
        return self

    # ---- names ----------------------------------------------------------------------------------------------------

    @property
    def prog_bar(self) -> bool:
        """Whether the progress bar shows the name."""
        return self.flags.prog_bar

    @property
    def logger(self) -> bool:
        """Whether the name is sent to loggers."""
        return self.flags.logger is not False

    @property
    def rank_zero_only(self) -> bool:
        """Whether only rank 0 logs the name."""
        return self.flags.rank_zero_only

    @property
    def plain_name(self) -> str:
        """The name without the suffixes for step and epoch."""
        return self.name + self.suffix

    @property
    def step_name(self) -> str:
        """The name of the step value, with a suffix if there is an epoch value too."""
        return f"{self.name}_step{self.suffix}" if self.on_epoch else self.plain_name

    @property
    def epoch_name(self) -> str:
        """The name of the epoch value, with a suffix if there is a step value too."""
        return f"{self.name}_epoch{self.suffix}" if self.on_step else self.plain_name

    # ---- accumulating ---------------------------------------------------------------------------------------------

    def add(self, value: float, weight: float) -> None:
        """Add a number; a weight of 0 changes nothing, even if the number is NaN."""
        if self.fx == "mean":
            if weight:
                self.values.append(value * weight)
                self.weights.append(weight)
        elif self.fx == "sum":
            self.values.append(value)
        elif self.extreme is None or value != value or self._beats(value, self.extreme):
            self.extreme = value
        if len(self.values) >= _COMPACT_AT:
            self._compact()

    def add_weighted(self, value: float, weight: int | float | Tensor) -> None:
        """Add a number with the weight that the user gave, which may be on a device."""
        if isinstance(weight, Tensor) and not weight.is_cpu:
            self.add_on_device(value, weight.detach().clone())
        else:
            self.add(value, float(weight))

    def _beats(self, value: float, extreme: float) -> bool:
        return value > extreme if self.fx == "max" else value < extreme

    def _compact(self) -> None:
        self.values = partials_of(self.values)
        self.weights = partials_of(self.weights)

    def add_on_device(self, value: Tensor | float, weight: Tensor | float) -> None:
        """Add a number that is not on the host yet, without waiting for its device."""
        self._waiting.append((value, weight))
        if len(self._waiting) >= _PARK_AT:
            while self._parked and self._parked[0].is_on_host():
                self._absorb(self._parked.pop(0))
            self._parked.append(HostNumbers(self._take()))

    def _take(self) -> list[tuple[Any, Any]]:
        waiting, self._waiting = self._waiting, []
        return waiting

    def _absorb(self, parked: HostNumbers) -> None:
        for value, weight in parked.read():
            self.add(value, weight)

    def copied(self) -> Entry:
        """Return a copy that later values do not change, without reading a device."""
        twin = copy(self)
        twin.values, twin.weights = [*self.values], [*self.weights]
        twin._waiting, twin._parked = [*self._waiting], [*self._parked]
        return twin

    def local(self) -> Part:
        """Return this rank's part. ``read_devices`` must have been called before."""
        if self.fx in ("mean", "sum"):
            self._compact()
            return self.fx, self.values, self.weights
        return self.fx, [] if self.extreme is None else [self.extreme], []

    def restore(self, values: list[float], weights: list[float]) -> None:
        """Add the sums that ``local`` returned, on this rank or on another."""
        if self.fx in ("mean", "sum"):
            self.values, self.weights = [*self.values, *values], [*self.weights, *weights]
        else:
            for value in values:
                self.add(value, 1.0)


@dataclass
class Scope:
    """The names that are logged in steps, or those that are logged in hooks of the epoch."""

    entries: dict[str, Entry] = field(default_factory=dict)
    latest: list[Any] = field(default_factory=list)
    """The newest value of each entry, or None. Beside the entries, so that ``log`` stores a value without a call."""
    _readers: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def add(self, key: str, entry: Entry) -> Entry:
        """Add an entry without a value, and return it."""
        entry.index = len(self.latest)
        self.entries[key] = entry
        self.latest.append(None)
        self._readers.clear()
        return entry

    def step_values(self, wanted: str) -> dict[str, Any]:
        """Return the newest values of the names that are logged per step and whose attribute ``wanted`` is true."""
        read = self._readers.get(wanted)
        if read is None:
            read = self._readers[wanted] = [
                (entry.step_name, entry.index)
                for entry in self.entries.values()
                if entry.on_step and getattr(entry, wanted)
            ]
        latest = self.latest
        return {name: value for name, index in read if (value := latest[index]) is not None}

    def clear(self) -> None:
        """Remove all names."""
        self.entries.clear()
        self.latest.clear()
        self._readers.clear()


def read_devices(entries: Iterable[Entry]) -> None:
    """Copy all values that are on a device to the host, with one synchronization."""
    taken = [(entry, entry._take()) for entry in entries]
    pairs = [pair for _, waiting in taken for pair in waiting]
    numbers = iter(HostNumbers(pairs).read() if pairs else ())
    for entry, waiting in taken:
        while entry._parked:
            entry._absorb(entry._parked.pop(0))
        for _ in waiting:
            entry.add(*next(numbers))


def combine(parts: Sequence[Part]) -> float:
    """Return the value of a name from the parts of all ranks; NaN if no rank has a value."""
    fx = parts[0][0]
    numbers = [number for _, values, _ in parts for number in values]
    if fx == "sum":
        return total_of(numbers)
    if fx == "mean":
        weight = total_of([weight for _, _, weights in parts for weight in weights])
        return total_of(numbers) / weight if weight else float("nan")
    if not numbers or any(number != number for number in numbers):
        return float("nan")
    return max(numbers) if fx == "max" else min(numbers)
