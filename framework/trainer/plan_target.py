"""``PlanTarget``: the machines that a plan is made for, where they are not the present one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..core.degrees import Degrees, resolve_degrees
from ..core.errors import ConfigurationError
from ..core.size_text import size_in_bytes
from ..memory.available_memory import Memory, gpu_libraries
from .rules import at_least

if TYPE_CHECKING:
    from ..parallel.resources import Resources
    from ..parallel.strategy import Strategy

_MOST_RANKS_OF_A_NODE = 8


@dataclass(frozen=True)
class PlanTarget:
    """The number of ranks and the memory that a plan is made for; None: those of the Trainer and of this machine."""

    ranks: int | None = None
    ranks_per_node: int | None = None
    """None: all, but at most 8."""
    device_memory: int | str | None = None
    """The memory of a device, in bytes or as ``"80GB"``."""
    host_memory: int | str | None = None
    """The memory of a node."""
    parallel: Mapping[str, int] | str | None = None
    """The degrees of parallelism."""
    rehearse: str | Strategy | None = None
    """The strategy whose step is rehearsed."""

    def check(self, own: Resources) -> None:
        """Check all values.

        Args:
            own: the devices and nodes of the Trainer.

        Raises:
            ConfigurationError: a value is not a number or a size, or the ranks do not fill their nodes or fit degrees.
        """
        for name in ("ranks", "ranks_per_node"):
            at_least(1)(name, getattr(self, name))
        ranks, local = self._ranks(own)
        if ranks % local:
            raise ConfigurationError(
                f"ranks={ranks} do not fill nodes of {local} ranks: set ranks_per_node to a number that divides them."
            )
        self._degrees(own).lay_out(ranks)
        for name in ("device_memory", "host_memory"):
            if (value := getattr(self, name)) is not None:
                size_in_bytes(value, name)

    def _ranks(self, own: Resources) -> tuple[int, int]:
        """Return the number of ranks, and that of each node."""
        if self.ranks is None and self.ranks_per_node is None:
            return own.world_size, own.devices
        ranks = own.world_size if self.ranks is None else self.ranks
        return ranks, min(ranks, self.ranks_per_node or _MOST_RANKS_OF_A_NODE)

    def _degrees(self, own: Resources) -> Degrees:
        return own.degrees if self.parallel is None else resolve_degrees(self.parallel)

    def resources(self, own: Resources) -> Resources:
        """Return the devices and nodes of the target."""
        ranks, local = self._ranks(own)
        return replace(own, devices=local, num_nodes=ranks // local, degrees=self._degrees(own))

    def memory(self, own: Memory, sharing: int) -> Memory:
        """Return the memory of a rank of the target.

        Args:
            own: the memory on this machine.
            sharing: the number of ranks of a node of the target.
        """
        host = own.host if self.host_memory is None else size_in_bytes(self.host_memory, "host_memory") // sharing
        if self.device_memory is None:
            return replace(own, host=host, device=host if own.device_is_host else own.device)
        device = size_in_bytes(self.device_memory, "device_memory")
        return Memory(max(0, device - gpu_libraries(sharing)), host, own.disk, device_is_host=False)
