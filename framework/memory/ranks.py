"""``Ranks``: the ranks of a plan."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.degrees import Degrees


@dataclass(frozen=True)
class Ranks:
    """The number of ranks, how many of them are on a node (None: all), and the degrees that were given."""

    world_size: int = 1
    local_size: int | None = None
    degrees: Degrees = field(default_factory=Degrees)

    @property
    def replicas(self) -> int:
        """The ranks over which replicas average gradients, without a split of their state."""
        laid_out = self.degrees.lay_out(self.world_size)
        return self.world_size // laid_out.tp // laid_out.pp
