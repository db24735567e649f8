"""The mesh of a pipeline: replicas, shards, stages and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...framework.core.degrees import Layout
from ...framework.distributed.world import World


@dataclass(frozen=True)
class StageMesh:
    """The ranks that work together with this one."""

    pipeline: dist.ProcessGroup
    """The ranks of this pipeline, in order; under tensor parallelism those with the same part of the layers."""
    replicas: dist.ProcessGroup
    """The ranks that hold the same stages, where their parameters are not sharded."""
    data: DeviceMesh | None
    """The ranks that share or replicate the stages of this rank; None if each of them holds its stages in full."""
    tensor: DeviceMesh | None
    """The ranks that share the layers of the stages; None if each computes full layers."""
    stride: int
    """The distance between two ranks of a pipeline."""


def build_mesh(layout: Layout, world: World) -> StageMesh:
    """Build the mesh of a layout. Collective."""
    names = ("replicate", "shard", "pipeline", "tensor")
    sizes = (layout.dp_replicate, layout.dp_shard, layout.pp, layout.tp)
    mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)
    data = None
    if layout.dp_shard > 1 or layout.tp > 1:
        data = mesh["replicate", "shard"] if layout.dp_replicate > 1 else mesh["shard"]
    tensor = mesh["tensor"] if layout.tp > 1 else None
    return StageMesh(mesh.get_group("pipeline"), mesh.get_group("replicate"), data, tensor, layout.tp)
