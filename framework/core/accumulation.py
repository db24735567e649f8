"""``AccumulationSchedule``: how many micro-batches make an optimizer step, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from .errors import ConfigurationError, is_count


class AccumulationSchedule:
    """A pure function of progress: the number of micro-batches in the window of an optimizer step.

    ``AccumulationSchedule({0: 1, 5: 4})`` takes one micro-batch at a time, and four from epoch 5 on. With
    ``unit="step"`` the keys count optimizer steps. ``AccumulationSchedule.cycle([1, 2, 3])`` repeats a list of sizes,
    one for each optimizer step. Because nothing is remembered, a resumed run continues it exactly.

    Raises:
        ConfigurationError: a factor is not a whole number from 1, or a key not one from 0.
    """

    def __init__(self, factors: int | Mapping[int, int], unit: Literal["epoch", "step"] = "epoch") -> None:
        table = dict(factors) if isinstance(factors, Mapping) else {0: factors}
        if unit not in ("epoch", "step"):
            raise ConfigurationError(f"unit={unit!r} is not known; an accumulation schedule counts 'epoch' or 'step'.")
        for start, factor in table.items():
            _check_whole("a factor of accumulate_grad_batches starts at ", start, 0)
            _check_whole("accumulate_grad_batches=", factor, 1)
        table.setdefault(0, 1)
        self.unit = unit
        self._starts = sorted(table)
        self._factors = [table[start] for start in self._starts]
        self._cycle: tuple[int, ...] = ()

    @classmethod
    def cycle(cls, factors: Sequence[int]) -> AccumulationSchedule:
        """Return the schedule whose optimizer step ``n`` takes ``factors[n % len(factors)]`` micro-batches."""
        if not factors:
            raise ConfigurationError("a cycle of accumulation factors is empty; give at least one.")
        schedule = cls(1, unit="step")
        for factor in factors:
            _check_whole("a factor of an accumulation cycle is ", factor, 1)
        schedule._cycle = tuple(factors)
        return schedule

    @property
    def constant(self) -> int | None:
        """The one factor of all time, or None where it changes."""
        return self._factors[0] if len(self._factors) == 1 and not self._cycle else None

    @property
    def largest(self) -> int:
        """The largest factor that ever occurs."""
        return max(self._cycle or self._factors)

    def __call__(self, epoch: int, step: int) -> int:
        """Return the window's size at an epoch and a count of optimizer steps done, both from 0."""
        if self._cycle:
            return self._cycle[step % len(self._cycle)]
        now = epoch if self.unit == "epoch" else step
        return next(
            factor
            for start, factor in zip(reversed(self._starts), reversed(self._factors), strict=True)
            if start <= now
        )

    def windows(self, batches: int, epoch: int, step: int) -> int:
        """Return how many optimizer steps an epoch of ``batches`` micro-batches takes; the last may be short."""
        factor = self.constant if self.unit == "step" else self(epoch, step)
        if factor is not None:
            return -(-batches // factor)
        count = 0
        while batches > 0:
            batches -= self(epoch, step + count)
            count += 1
        return count

    def __repr__(self) -> str:
        if self._cycle:
            return f"AccumulationSchedule.cycle({list(self._cycle)})"
        return f"AccumulationSchedule({dict(zip(self._starts, self._factors, strict=True))}, unit={self.unit!r})"

    def __str__(self) -> str:
        if self.constant is not None:
            return str(self.constant)
        if self._cycle:
            return "cycle of " + ", ".join(map(str, self._cycle))
        pairs = zip(self._starts, self._factors, strict=True)
        return ", ".join(f"{factor} from {self.unit} {start}" for start, factor in pairs)


def resolve_accumulation(given: int | Mapping[int, int] | AccumulationSchedule) -> AccumulationSchedule:
    """Return the schedule for an int, a dict ``{epoch: factor}`` or a schedule."""
    return given if isinstance(given, AccumulationSchedule) else AccumulationSchedule(given)


def _check_whole(what: str, value: object, least: int) -> None:
    if not is_count(value, least):
        raise ConfigurationError(f"{what}{value!r}: it must be a whole number of at least {least}.")
