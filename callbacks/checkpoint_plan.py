"""The plan of ``ModelCheckpoint`` for one save, decided by rank 0 and broadcast to all ranks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavePlan:
    """The plan of one save; the same on every rank."""

    last: str = ""
    """The path of ``last.ckpt``; empty without ``save_last``."""
    path: str = ""
    """The path of a checkpoint that one of the rules retains; empty where no rule does."""
    score: float | None = None
    """The metric it is ranked by; None without one."""
    counts: bool = False
    """Whether this is a checkpoint that was due, with all that it needs known."""
    missing: str | None = None
    """The metric that is not known yet, as a sentence: what needs it waits."""

    @property
    def targets(self) -> list[str]:
        """The paths to write."""
        return [path for path in (self.path, self.last) if path]
