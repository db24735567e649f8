"""The plan of ``ModelCheckpoint`` for one save, decided by rank 0 and broadcast to all ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavePlan:
    """The plan of one save; the same on every rank."""

    last: str = ""
    """The path of ``last.ckpt``; empty without ``save_last``."""
    path: str = ""
    """The path of a checkpoint that one of the rules retains; empty if no rule does."""
    score: float | None = None
    """The value of the metric that ranks the checkpoint; None without a metric."""
    counts: bool = False
    """Whether a due checkpoint is saved now, with all the metrics that it needs."""
    missing: str | None = None
    """A sentence that names the metric that is not known yet; files that need it are saved later."""

    @property
    def targets(self) -> list[str]:
        """The paths to write."""
        return [path for path in (self.path, self.last) if path]
