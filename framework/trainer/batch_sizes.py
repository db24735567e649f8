"""``Trainer.find_batch_size``: the largest micro-batch whose step fits into the memory of every rank.

Each size is tried by a short fit of a copy of the module with ``micro_batch_size="auto:<size>"``, whose ranks agree on
whether one of them has run out of memory in the forward pass, the backward pass or the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..api.callback import Callback
from ..core.errors import ConfigurationError, is_count, unknown
from ..core.wording import counted
from ..distributed.devices import empty_caches
from ..memory.memory_plan import largest_micro_batch
from .trial_fit import trial_fit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..api.train_module import TrainModule
    from ..core.precision import Precision
    from ..memory.memory_plan import MemoryPlan
    from .session import Session, StageRequest

MODES = ("binsearch", "power")


@dataclass(frozen=True)
class BatchSizeTest:
    """The sizes that a search tries; see ``Trainer.find_batch_size``."""

    mode: str = "binsearch"
    steps_per_trial: int = 3
    init_val: int | None = None
    max_trials: int = 25
    max_val: int | None = None

    def check(self) -> None:
        """Check all values.

        Raises:
            ConfigurationError: a value is out of its range.
        """
        if self.mode not in MODES:
            raise unknown("mode", str(self.mode), MODES)
        # The second step runs beside the gradients of the first one, as all but the first micro-batch of a window do,
        # and beside the state that its update has allocated.
        for name, least in {"steps_per_trial": 2, "init_val": 1, "max_trials": 1, "max_val": 1}.items():
            value = getattr(self, name)
            if not is_count(value, least) and (value is not None or name not in ("init_val", "max_val")):
                raise ConfigurationError(f"{name}={value!r} must be a whole number of at least {least}.")
        if self.init_val is not None and self.max_val is not None and self.init_val > self.max_val:
            raise ConfigurationError(f"init_val={self.init_val} is more than max_val={self.max_val}.")


@dataclass(frozen=True)
class BatchSizeTrial:
    """A size that was tried, in samples of one rank, and whether its steps fitted into the memory of all ranks."""

    size: int
    fits: bool


@dataclass(frozen=True)
class BatchSizes:
    """The result of a search, the same on every rank. Its ``str`` is a summary.

    Attributes:
        size: the largest micro-batch that was tried and fits, in samples of one rank.
        trials: the trials, in their order.
        limit: the largest size that could be tried.
    """

    size: int
    trials: tuple[BatchSizeTrial, ...]
    limit: int

    @property
    def smallest_failure(self) -> int | None:
        """The smallest size that did not fit; None if all did."""
        return min((trial.size for trial in self.trials if not trial.fits), default=None)

    @property
    def is_largest(self) -> bool:
        """Whether no larger size fits: the next one was tried, or there is none."""
        return self.size == self.limit or self.smallest_failure == self.size + 1

    def __str__(self) -> str:
        tried = ", ".join(f"{trial.size} {'fits' if trial.fits else 'does not fit'}" for trial in self.trials)
        if self.size == self.limit:
            reason = "the upper limit"
        elif self.smallest_failure is None:
            reason = "the last size that was tried"
        else:
            reason = f"and {self.smallest_failure} {'does' if self.smallest_failure == 1 else 'do'} not fit"
        return f"Micro-batch size {self.size}, {reason}. {counted(len(self.trials), 'trial')}: {tried}."


class MicroBatchTrial(Callback):
    """Ends a fit once its micro-batches have become smaller than ``size``, without running one of those."""

    def __init__(self, size: int) -> None:
        self.size = size

    def on_train_start(self, trainer: Any, module: TrainModule) -> None:
        """Leave out the schedulers, which may need the metrics of a validation."""
        trainer.pause_lr_schedulers()

    def on_train_batch_start(self, trainer: Any, module: TrainModule, batch: Any, batch_idx: int) -> Any:
        """Skip the rest of the fit if a rank has run out of memory, as all ranks have agreed."""
        if trainer.micro_batch_size >= self.size:
            return None
        trainer.should_stop = True
        return -1

    def show(self, text: str) -> bool:
        """Drop the lines of a trial, whose training does not continue."""
        return True


class BatchSizeSearch:
    """The state of a search: the bounds of the size, and the trials.

    Args:
        test: the arguments of the search.
        limit: the largest size that can be tried.
    """

    def __init__(self, test: BatchSizeTest, limit: int) -> None:
        self._test, self._limit = test, limit
        self._low, self._high = 0, limit + 1
        self.trials: list[BatchSizeTrial] = []

    def sizes(self, first: int) -> Iterator[int]:
        """Yield the sizes to try, from ``first`` on; ``record`` takes the outcome of each."""
        size: int | None = min(first, self._limit)
        while size is not None and len(self.trials) < self._test.max_trials:
            yield size
            size = self._next()

    def record(self, size: int, reached: int) -> None:
        """Record a trial.

        Args:
            size: the size it has begun with.
            reached: the size at its end, which is smaller if ``size`` does not fit.
        """
        self.trials.append(BatchSizeTrial(size, reached == size))
        if reached == size:
            self._low = size
        else:
            self._high = size

    def _next(self) -> int | None:
        """Return the next size; None if the result is known."""
        low, high = self._low, self._high
        if high - low <= 1:
            return None
        if high > self._limit:
            return min(2 * low, self._limit)
        if low == 0:
            return high // 2
        return (low + high) // 2 if self._test.mode == "binsearch" else None

    def result(self) -> BatchSizes:
        """Return the result.

        Raises:
            ConfigurationError: no size that was tried fits.
        """
        if self._low == 0:
            tried = ", ".join(str(trial.size) for trial in self.trials)
            raise ConfigurationError(
                f"find_batch_size found no size that fits in max_trials={self._test.max_trials}: {tried} did not; give "
                "a smaller init_val, or more trials."
            )
        return BatchSizes(self._low, tuple(self.trials), self._limit)


def start_of_search(
    plan: MemoryPlan, strategy: str, precision: Precision, ranks: int, init_val: int | None
) -> tuple[int, int]:
    """Return the samples of an epoch over all ranks, and the first size on this rank.

    Args:
        ranks: the number of parts of the data.
        init_val: the first size, if it was given.

    Raises:
        ConfigurationError: the number of samples is unknown, or smaller than the number of ranks.
    """
    samples = None if plan.data is None else plan.data.samples
    if samples is None:
        reasons = "".join(f" {note}" for note in plan.notes)
        raise ConfigurationError(
            "find_batch_size takes the samples of one DataLoader over a map-style dataset, and their number is not "
            f"known here.{reasons}"
        )
    if samples < ranks:
        raise ConfigurationError(f"find_batch_size got {samples} samples for {ranks} ranks: give at least {ranks}.")
    return samples, init_val or largest_micro_batch(plan, strategy, precision, samples // ranks) or 2


def run_batch_size_search(
    session: Session, request: StageRequest, test: BatchSizeTest, first: int, samples: int, ranks: int
) -> BatchSizes:
    """Try sizes in Trainers of their own, which write nothing; return the result. Collective.

    Args:
        session: the state of the Trainer that was asked.
        request: the module and its training data.
        test: the sizes.
        first: the first size.
        samples: the samples of an epoch over all ranks.
        ranks: the number of parts of the data.

    Raises:
        ConfigurationError: no size that was tried fits.
    """
    share = samples // ranks
    search = BatchSizeSearch(test, min(test.max_val or share, share))
    for size in search.sizes(first):
        settings = {
            "global_batch_size": size * ranks,
            "micro_batch_size": f"auto:{size}",
            "accumulate_grad_batches": 1,
            # A last batch that is not full would not be of this size, and may be too small for a batch norm.
            "limit_train_batches": samples // (size * ranks),
            "max_steps": test.steps_per_trial,
        }
        trial = MicroBatchTrial(size)
        reached = trial_fit(session, request, trial, **settings).micro_batch_size
        search.record(size, reached)
        empty_caches()
    return search.result()
