"""The device mesh, with axes for replicas, shards and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...framework.core.errors import ConfigurationError
from ...framework.distributed.world import World

Replicas = int | Literal["node"]


@dataclass(frozen=True)
class Layout:
    """The number of ranks of each axis of the mesh."""

    replicas: int
    shards: int
    tensor: int

    def build(self, world: World) -> DeviceMesh:
        """Build the mesh: ``shard``, and ``replicate`` and ``tensor`` if they have several ranks. Collective."""
        axes = {"replicate": self.replicas, "shard": self.shards, "tensor": self.tensor}
        kept = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
        return init_device_mesh(world.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))

    def data_part(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the sub-mesh to pass to ``fully_shard``."""
        if self.tensor == 1:
            return mesh
        return mesh["replicate", "shard"] if self.replicas > 1 else mesh["shard"]


def lay_out(world_size: int, num_nodes: int, replicas: Replicas, tensor_parallel: int) -> Layout:
    """Return the layout of a number of ranks.

    Raises:
        ConfigurationError: the ranks cannot be divided in this way.
    """
    if world_size % tensor_parallel:
        raise ConfigurationError(
            f"FSDPStrategy(tensor_parallel={tensor_parallel}) with {world_size} ranks: groups of {tensor_parallel} do "
            f"not divide them. Use one of {_divisors(world_size)}, or another number of devices."
        )
    data = world_size // tensor_parallel
    count = _by_node(data, num_nodes) if replicas == "node" else replicas
    if data % count:
        what = "strategy='hsdp'" if replicas == "node" else f"FSDPStrategy(replicas={count})"
        groups = f"{data} groups of tensor_parallel={tensor_parallel}" if tensor_parallel > 1 else f"{data} ranks"
        raise ConfigurationError(
            f"{what} with {groups}: {count} replicas do not divide them. Use a number of replicas out of "
            f"{_divisors(data)} with FSDPStrategy(replicas=...), another number of devices, or strategy='fsdp'."
        )
    return Layout(count, data // count, tensor_parallel)


def _by_node(data: int, num_nodes: int) -> int:
    """Return the number of replicas: one per node; two on a single node, one for a single rank."""
    if data == 1:
        return 1
    return num_nodes if num_nodes > 1 else 2


def _divisors(number: int) -> str:
    return ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)
