"""Read-only attributes about the ranks of a Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..distributed.world import World
    from ..parallel.strategy import Strategy
    from ..system.launcher_env import Placement
    from .session import Session


class RankProperties:
    """Rank, strategy and precision of a Trainer's process."""

    _session: Session

    @property
    def world(self) -> World:
        """This process among the ranks."""
        return self._session.fabric.world

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return self._session.fabric.strategy

    @property
    def precision(self) -> str:
        """The name of the precision."""
        return self._session.fabric.precision.name

    @property
    def _place(self) -> Placement:
        return self._session.resources.place

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    @property
    def global_rank(self) -> int:
        """This process's rank among all."""
        return self._place.rank

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self._place.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this process's node."""
        return self._place.node_rank

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self._session.resources.world_size

    @property
    def num_devices(self) -> int:
        """Ranks on each node."""
        return self._session.resources.devices

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return self._session.resources.num_nodes
