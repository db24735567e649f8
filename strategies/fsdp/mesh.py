"""The device mesh of sharded models, with axes for replicas, shards and tensor parallelism."""

from __future__ import annotations

from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...framework.core.degrees import Degrees, Layout, divisors
from ...framework.core.errors import ConfigurationError
from ...framework.distributed.world import World

Replicas = int | Literal["node"]


# The arguments of ``FSDPStrategy`` for degrees, by axis.
_ARGUMENTS = {"dp_replicate": "replicas", "tp": "tensor_parallel"}


def own_degrees(replicas: Replicas, tensor_parallel: int) -> Degrees:
    """Return the degrees that the arguments of ``FSDPStrategy`` give; 1 is the default, which ``parallel=`` replaces.

    A replica of each node is laid out when the number of nodes is known.
    """
    count = replicas if isinstance(replicas, int) and replicas > 1 else None
    return Degrees(dp_replicate=count, tp=tensor_parallel if tensor_parallel > 1 else None)


def as_arguments(degrees: Degrees) -> str:
    """Return degrees as arguments of ``FSDPStrategy``."""
    return ", ".join(f"{_ARGUMENTS.get(axis, axis)}={degree}" for axis, degree in degrees.given.items())


def build_mesh(layout: Layout, world: World, rest: str) -> DeviceMesh:
    """Build the mesh: ``shard``, and ``replicate`` and ``tensor`` if they have several ranks. Collective.

    Ranks that share sequences hold different parts of the state, or replicas of it if ``rest`` is ``dp_replicate``.
    """
    replicas = layout.cp if rest == "dp_replicate" else 1
    axes = {
        "replicate": layout.dp_replicate * replicas,
        "shard": layout.dp_shard * layout.cp // replicas,
        "tensor": layout.tp,
    }
    kept = {name: size for name, size in axes.items() if size > 1 or name == "shard"}
    return init_device_mesh(world.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))


def data_part(mesh: DeviceMesh) -> DeviceMesh:
    """Return the sub-mesh to pass to ``fully_shard``."""
    names = mesh.mesh_dim_names or ()
    if "tensor" not in names:
        return mesh
    return mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]


def lay_out(world_size: int, num_nodes: int, degrees: Degrees, rest: str, by_node: bool) -> Layout:
    """Return the layout of a number of ranks; ``by_node`` makes a replica of each node, ``rest`` takes those left.

    Raises:
        ConfigurationError: the ranks cannot be divided in this way.
    """
    if not by_node or degrees.dp_replicate is not None or degrees.dp_shard is not None:
        return degrees.lay_out(world_size, rest)
    data = degrees.lay_out(world_size).data_size
    # One replica per node; two on a single node, one for a single rank.
    count = 1 if data == 1 else max(num_nodes, 2)
    if data % count:
        groups = f"{data} groups of tp={degrees.tp}" if data < world_size else f"{data} ranks"
        raise ConfigurationError(
            f"strategy='hsdp' with {groups}: {count} replicas do not divide them. Use a number of replicas out of "
            f"{divisors(data)} with parallel={{'dp_replicate': ...}}, another number of devices, or strategy='fsdp'."
        )
    return Degrees(**{**degrees.given, "dp_replicate": count}).lay_out(world_size)
