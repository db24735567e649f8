"""The arguments with which a model is sharded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .activations import Checkpointed
from .experts import ExpertMeshes
from .outside import Context
from .units import Units


@dataclass
class Sharding:
    """The arguments of ``fully_shard`` for a model; ``FSDPStrategy`` describes those that users give."""

    units: Units
    mesh: DeviceMesh
    tensor_mesh: DeviceMesh | None
    policy: MixedPrecisionPolicy
    reshard_after_forward: bool | int
    cpu_offload: bool
    prefetch: int
    checkpointed: Checkpointed
    context: Callable[[], Context]
    """Returns the context of forward passes in the gathered parameters' dtype, None if they need none."""
    backward_inside: bool = False
    """Whether the model runs again after a backward pass before its outermost call returns (manual optimization)."""
    experts: ExpertMeshes | None = None
    """The ranks that hold different experts, and those that hold the same ones."""
