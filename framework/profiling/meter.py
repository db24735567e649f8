"""``Meter``: counts what a fit trains, and the seconds that it takes, in every step.

A step costs three readings of the clock and a few additions, and nothing waits for a device. With several ranks the
numbers of a step travel in the control reduction of the next one, and those of the last step in the agreement at the
end of the epoch. So every rank knows the sums over all ranks, without a collective of the meter's own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..core.accelerators import peak_memory
from ..metrics.log_arguments import batch_items
from ..system.processes import peak_resident_bytes
from .device_peaks import device_peak_flops
from .throughput import Throughput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..distributed.world import World
    from .flop_count import FlopCount


class Counts(NamedTuple):
    """The counts of some steps, summed over the ranks."""

    units: float = 0.0
    """Trained tokens or samples; ranks that read the same data count each."""
    seconds: float = 0.0
    """In steps and in waiting for data."""
    data_seconds: float = 0.0
    """Spent on waiting for data."""
    wait_seconds: float = 0.0
    """Spent on waiting for the control reductions of other ranks."""
    steps: int = 0
    """Optimizer steps, the same on every rank."""

    def since(self, other: Counts) -> Counts:
        """Return the difference to earlier counts."""
        return Counts(
            self.units - other.units,
            self.seconds - other.seconds,
            self.data_seconds - other.data_seconds,
            self.wait_seconds - other.wait_seconds,
            self.steps - other.steps,
        )


class Meter:
    """The counts of one fit.

    Args:
        world: the ranks.
        unit: the kind of unit that ``add`` counts, ``"tokens"`` or ``"samples"``.
    """

    def __init__(self, world: World, unit: str = "samples") -> None:
        self.unit = unit
        self.flop_count: FlopCount | None = None
        """Counts the FLOPs of the first steps of this rank; None after those steps, and where nothing is counted."""
        self.flops_per_unit: float | None = None
        """Model FLOPs of a unit, forward and backward; None if they were not counted."""
        self.peak_flops: float | None = None
        """FLOPs that one device can compute in a second in the precision of the run; None if unknown."""
        self._world = world
        self._is_shared = world.size > 1
        self.open_units = 0.0
        """Units of the step in progress, on this rank."""
        self._open_wait = 0.0
        self._flop_units = 0.0
        # Of ended steps on this rank; with several ranks, since the last call of `unsent`.
        self._units = self._seconds = self._data_seconds = self._wait_seconds = 0.0
        # Of all ranks; in attributes of their own, since a tuple takes longer to make than to add up.
        self._all_units = self._all_seconds = self._all_data_seconds = self._all_wait_seconds = 0.0
        self._steps = self._sent_steps = self._all_steps = 0

    # ---- counting, in every step ------------------------------------------------------------------------------------

    def adding(self, weight: Callable[[Any], Any]) -> Callable[[Any], float]:
        """Return ``weight``, the results of which are counted as units."""

        def counted(batch: Any) -> float:
            units = float(weight(batch))
            self.open_units += units
            return units

        return counted

    def waited(self, seconds: float) -> None:
        """Count time in which this rank waited for the control reduction of the step in progress."""
        self._open_wait += seconds

    def fetched(self, seconds: float) -> None:
        """Count time in which data was fetched within the step in progress."""
        self._data_seconds += seconds

    def drop_units(self) -> None:
        """Forget the units of the step in progress, which does not take place."""
        self.open_units = 0.0

    def drop_step(self) -> None:
        """Forget the step in progress, which is repeated."""
        self.drop_units()
        if self.flop_count is not None:
            self.flop_count.clear()

    def end_step(self, began: float, fetched: float) -> None:
        """End a step.

        Args:
            began: ``time.perf_counter()`` before its data was fetched.
            fetched: the same, afterwards.
        """
        self._seconds += time.perf_counter() - began
        self._data_seconds += fetched - began
        self._units += self.open_units
        self.open_units = 0.0
        self._steps += 1
        if self._is_shared:
            self._wait_seconds += self._open_wait
            self._open_wait = 0.0

    # ---- sharing over ranks -----------------------------------------------------------------------------------------

    def unsent(self) -> tuple[float, ...]:
        """Return this rank's counts of the steps that ended since the last call, to be summed over the ranks."""
        counts = self._units, self._seconds, self._data_seconds, self._wait_seconds
        self._units = self._seconds = self._data_seconds = self._wait_seconds = 0.0
        self._sent_steps = self._steps
        return counts

    def receive(self, totals: Sequence[float]) -> None:
        """Add the sums over the ranks of what they returned from ``unsent``."""
        units, seconds, data_seconds, wait_seconds = totals
        self._all_units += units
        self._all_seconds += seconds
        self._all_data_seconds += data_seconds
        self._all_wait_seconds += wait_seconds
        self._all_steps = self._sent_steps

    # ---- reading ----------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        """The counts so far; with several ranks, without the last step of an epoch in progress."""
        if self._is_shared:
            return Counts(
                self._all_units, self._all_seconds, self._all_data_seconds, self._all_wait_seconds, self._all_steps
            )
        return Counts(self._units, self._seconds, self._data_seconds, self._wait_seconds, self._steps)

    def note_flops(self) -> None:
        """Set the FLOPs of a unit from those counted so far, the step in progress included."""
        self._flop_units += self.open_units
        flops = None if self.flop_count is None else self.flop_count.total
        self.flops_per_unit = None if flops is None or not self._flop_units else flops / self._flop_units

    def use_peak(self, given: float | None, dtype: torch.dtype) -> None:
        """Set the peak of a device: as given, or as known for this device and this dtype of matrix products."""
        self.peak_flops = given if given is not None else device_peak_flops(self._world.device, dtype)

    def throughput(self, since: Counts | None = None) -> Throughput | None:
        """Return the speed since the start of the fit, or since earlier ``counts``; None if no step has ended since."""
        counts = self.counts if since is None else self.counts.since(since)
        ranks = self._world.size
        if not counts.steps or counts.seconds <= 0:
            return None
        seconds = counts.seconds / ranks
        units = counts.units / self._world.identical
        flops = None if self.flops_per_unit is None else self.flops_per_unit * units / seconds
        return Throughput(
            unit=self.unit,
            count=units,
            per_second=units / seconds,
            steps=counts.steps,
            step_seconds=seconds / counts.steps,
            train_seconds=seconds,
            data_share=counts.data_seconds / counts.seconds,
            rank_wait_share=counts.wait_seconds / counts.seconds if self._is_shared else None,
            flops_per_second=flops,
            flops_per_unit=self.flops_per_unit,
            device_peak_flops=self.peak_flops,
            mfu=None if flops is None or self.peak_flops is None else flops / (ranks * self.peak_flops),
            peak_memory_bytes=self.peak_memory(),
        )

    def peak_memory(self) -> int:
        """Return the largest number of bytes that this rank has used: of its device, else of the process."""
        peak = peak_memory(self._world.device)
        return peak_resident_bytes() if peak is None else peak


class SpeedInterval:
    """The speed of a meter since the previous reading.

    Args:
        meter: the meter.
        least_seconds: seconds of training that a reading covers at least.
    """

    def __init__(self, meter: Meter, least_seconds: float = 0.0) -> None:
        self._meter = meter
        self._least_seconds = least_seconds
        self._read = meter.counts

    def take(self) -> Throughput | None:
        """Return the speed since the previous reading; None if too few steps have ended since then."""
        found = self._meter.throughput(self._read)
        if found is None or found.train_seconds < self._least_seconds:
            return None
        self._read = self._meter.counts
        return found


class SampleCount:
    """Counts the samples of batches as ``batch_items`` does.

    The place of the first tensor is looked for in the first batch. In batches of the same class it is tried first,
    which takes a fraction of the time.
    """

    def __init__(self) -> None:
        self._class: Any = None
        self._key: Any = None

    def __call__(self, batch: Any) -> int:
        """Return the number of samples of a batch."""
        if batch.__class__ is self._class:
            try:
                number: int = batch[self._key].shape[0]
            except (LookupError, AttributeError, TypeError):
                pass
            else:
                return number
        return self._look(batch)

    def _look(self, batch: Any) -> int:
        pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if _is_sequence(batch) else ()
        key, first = next(iter(pairs), (None, None))
        if isinstance(first, Tensor) and first.dim():
            self._class, self._key = type(batch), key
        return batch_items(batch)


def _is_sequence(batch: Any) -> bool:
    return type(batch) in (list, tuple)
