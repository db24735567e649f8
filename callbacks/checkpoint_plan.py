"""What ``ModelCheckpoint`` is about to do at one moment, decided by rank 0 and told to all."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SavePlan:
    """One moment's plan; the same on every rank."""

    last: str = ""
    """Where the newest state goes; empty where none is kept apart."""
    path: str = ""
    """Where a checkpoint goes that is kept by one of the rules; empty where none of them wants it."""
    score: float | None = None
    """The metric it is ranked by; None without one."""
    counts: bool = False
    """Whether this is a checkpoint that was due, with all that it needs known."""
    missing: str | None = None
    """The metric that is not known yet, as a sentence: what needs it waits."""

    @property
    def targets(self) -> list[str]:
        """What is to be written, under which names."""
        return [path for path in (self.path, self.last) if path]
