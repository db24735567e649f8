"""``Progress``: the counters of a run. Batches, optimizer steps and samples are counted separately."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass
class Progress:
    """Counters of a fit; all are the same on every rank."""

    epoch: int = 0
    """The epoch in progress, from 0."""
    batch_in_epoch: int = 0
    """Micro-batches that each rank has consumed in this epoch."""
    global_batch: int = 0
    """Micro-batches that each rank has consumed in the whole run."""
    global_step: int = 0
    """Optimizer updates that were applied. An update skipped because of an overflow does not count."""
    attempts: int = 0
    """Optimizer steps that were reached, applied or not. Ranks compare this number to detect a desync."""
    epoch_ended: bool = False
    """The epoch's last batch and its hooks are done; a resumed run continues with the next epoch."""
    epoch_cut: bool = False
    """A hook has requested that this epoch ends early."""
    validated_at: int = -1
    """``global_batch`` of the last validation, so that a run resumed after it does not validate again."""

    published: int = 0
    """``global_step`` at which step values were last sent to the loggers."""
    hooks_started: int = 0
    """The number of ``on_train_epoch_start`` hooks that have begun in this epoch, the running one included."""

    def next_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.epoch += 1
        self.batch_in_epoch = 0
        self.hooks_started = 0
        self.epoch_ended = self.epoch_cut = False

    def state_dict(self) -> dict[str, Any]:
        """Return the counters."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counters; those missing from an older checkpoint keep their initial value."""
        for field in fields(self):
            if field.name in state:
                setattr(self, field.name, state[field.name])
