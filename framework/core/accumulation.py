"""``AccumulationSchedule``: the number of micro-batches per optimizer step, which may change during a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from .arguments import names_arguments
from .errors import ConfigurationError, is_count


class AccumulationSchedule:
    """The number of micro-batches per optimizer step, as a pure function of the epoch and the step.

    ``AccumulationSchedule({0: 1, 5: 4})`` accumulates one micro-batch at first, and four from epoch 5. With
    ``unit="step"`` the keys count optimizer steps. ``AccumulationSchedule.cycle([1, 2, 3])`` repeats a list of sizes,
    one for each optimizer step. The schedule has no state, so a resumed run continues it exactly.

    Raises:
        ConfigurationError: a factor is not an integer of at least 1, or a key is not an integer of at least 0.
    """

    @names_arguments
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
        """The factor if it never changes, else None."""
        return self._factors[0] if len(self._factors) == 1 and not self._cycle else None

    @property
    def largest(self) -> int:
        """The largest factor that ever occurs."""
        return max(self._cycle or self._factors)

    @property
    def sizes(self) -> tuple[int, ...]:
        """All factors that occur."""
        return self._cycle or tuple(self._factors)

    def __call__(self, epoch: int, step: int) -> int:
        """Return the number of micro-batches of the next optimizer step, given the epoch and the steps done so far."""
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
