"""``Progress``: the counters of a run. Micro-batches and optimizer steps are counted separately."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

_KEYS = {"steps_reached": "attempts"}
"""The keys of counters in a checkpoint that differ from their names here."""


@dataclass
class Progress:
    """Counters of a fit; all are the same on every rank."""

    epoch: int = 0
    """The epoch in progress, from 0."""
    batch_in_epoch: int = 0
    """Micro-batches that each rank has consumed in this epoch; global batches where their size is fixed."""
    global_batch: int = 0
    """Micro-batches that each rank has consumed in the whole run."""
    global_step: int = 0
    """Optimizer updates that were applied. Skipped updates do not count."""
    steps_reached: int = 0
    """Optimizer steps that were reached, applied or not. Ranks compare it to detect that they diverge."""
    epoch_ended: bool = False
    """The epoch's last batch and its hooks are done; a resumed run continues with the next epoch."""
    epoch_cut: bool = False
    """A hook has requested that this epoch ends early."""
    validated_at: int = -1
    """``global_batch`` of the last validation, so that a run resumed after it does not validate again."""

    validated_step: int = 0
    """``global_step`` of the last validation."""
    validated_units: float = 0.0
    """``units`` of the last validation."""
    units: float | None = 0.0
    """Tokens or samples of all ranks that were trained in the whole run; None in a run that does not count them."""
    unit: str = ""
    """The unit of ``units``: ``"tokens"`` or ``"samples"``."""

    published: int = 0
    """``global_step`` at which step values were last sent to the loggers."""
    judged_at: int = 0
    """``global_step`` at which schedulers that read a metric after a step were last advanced."""
    hooks_started: int = 0
    """Number of hooks ``on_train_epoch_start`` that have begun in this epoch, the running one included."""

    @property
    def attempts(self) -> int:
        """The former name of ``steps_reached``."""
        return self.steps_reached

    @property
    def epochs_done(self) -> int:
        """The number of epochs that have ended."""
        return self.epoch + self.epoch_ended

    def next_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch += 1
        self.batch_in_epoch = 0
        self.hooks_started = 0
        self.epoch_ended = self.epoch_cut = False

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return {_KEYS.get(name, name): value for name, value in asdict(self).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load counters. Counters that an older checkpoint lacks keep their initial value."""
        # Earlier versions advanced the schedulers in the step itself.
        self.judged_at = self.validated_step = state.get("global_step", 0)
        # They did not count them.
        self.units = None if self.judged_at else 0.0
        for field in fields(self):
            key = _KEYS.get(field.name, field.name)
            if key in state:
                setattr(self, field.name, state[key])
