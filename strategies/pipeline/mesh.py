"""The mesh of a pipeline: stages, replicas, shards and tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...framework.core.degrees import Layout
from ...framework.distributed.world import World


@dataclass(frozen=True)
class StageMesh:
    """The ranks that work together with this one."""

    pipeline: dist.ProcessGroup
    """The ranks of this pipeline, in order: those with the same part of the layers and of the sequences."""
    replicas: dist.ProcessGroup
    """The ranks that hold the same stages, where their parameters are not sharded."""
    data: DeviceMesh | None
    """The ranks that share or replicate the stages of this rank; None if each of them holds its stages in full."""
    tensor: DeviceMesh | None
    """The ranks that share the layers of the stages; None if each computes full layers."""
    stride: int
    """The distance between two ranks of a pipeline."""


def build_mesh(layout: Layout, world: World) -> StageMesh:
    """Build the mesh of a layout. Collective.

    Ranks that share sequences hold different parts of the state of their stages if ``dp_shard`` shares it, else
    replicas.
    """
    parts = layout.cp if layout.dp_shard > 1 else 1
    replicate, shard = layout.dp_replicate * layout.cp // parts, layout.dp_shard * parts
    ranks = torch.arange(world.size).view(layout.data_size, layout.pp, layout.cp, layout.tp).transpose(0, 1)
    mesh = DeviceMesh(
        world.device.type,
        ranks.reshape(layout.pp, replicate, shard, layout.tp),
        mesh_dim_names=("pipeline", "replicate", "shard", "tensor"),
    )
    data = None
    if layout.dp_shard > 1 or layout.tp > 1:
        data = mesh["replicate", "shard"] if replicate > 1 else mesh["shard"]
    tensor = mesh["tensor"] if layout.tp > 1 else None
    return StageMesh(mesh.get_group("pipeline"), mesh.get_group("replicate"), data, tensor, layout.cp * layout.tp)
