"""``ThroughputMonitor``: logs the speed of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..framework.api.callback import Callback
from ..framework.core.absent_names import lacks
from ..framework.core.errors import ConfigurationError
from ..framework.core.foreign_names import MEMBERS
from ..framework.core.intervals import WITHIN_EPOCHS, Due, Interval
from ..framework.profiling.meter import SpeedInterval

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView
    from ..framework.api.train_module import TrainModule


@lacks(MEMBERS["ThroughputMonitor"])
class ThroughputMonitor(Callback):
    """Log the speed of the steps since the previous logged one, at the steps that ``log_every_n_steps`` logs.

    The names begin with ``throughput/``; ``Trainer.throughput`` has the same numbers for the entire fit. With several
    ranks they are those of all ranks, except ``peak_memory_bytes``. A step that is logged has not ended yet, so it is
    part of the next values.

    Args:
        batch_size_fn: Accepted for programs written for Lightning: the samples of a batch are counted without it.
        length_fn: The same. Define ``batch_weight`` in the module to count tokens.
        every: Log at another interval, such as ``"100 steps"``, ``"1e6 tokens"`` or ``"1 min"``.

    Raises:
        ConfigurationError: The Trainer has no logger, or ``every`` is not an interval.
    """

    def __init__(
        self,
        batch_size_fn: Callable[[Any], int] | None = None,
        length_fn: Callable[[Any], int] | None = None,
        every: str | int | None = None,
    ) -> None:
        self.batch_size_fn = batch_size_fn
        self.length_fn = length_fn
        self._given = None if every is None else Interval.parse(every, owner="ThroughputMonitor", units=WITHIN_EPOCHS)
        self.counted_intervals = () if self._given is None else (self._given,)
        self._due: Due | None = None
        self._every = 1
        self._logged_step = -1
        self._interval: SpeedInterval | None = None

    def check(self, trainer: TrainerView, stage: str) -> None:
        if not trainer.loggers and not trainer.fast_dev_run:
            raise ConfigurationError(
                "ThroughputMonitor requires a logger: pass one to the Trainer, or remove the callback; without it, "
                "trainer.throughput and report.json have the speed of the fit."
            )

    def on_train_start(self, trainer: TrainerView, module: TrainModule) -> None:
        self._every, self._logged_step = trainer.log_every_n_steps, trainer.global_step
        self._interval = SpeedInterval(trainer.run.meter)
        self._due = None if self._given is None else Due(self._given, trainer, self.state_key)

    def on_train_batch_end(
        self, trainer: TrainerView, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._logged_step or self._interval is None:
            return
        if step % self._every if self._due is None else not self._due.reached():
            return
        self._logged_step = step
        found = self._interval.take()
        if found is not None:
            trainer.log_metrics(found.logged())
