"""The memory into which a sharded model's parameters are gathered, prepared before the first step.

The records of torch's FSDP are private, and covered by the tests: ``fsdp_params`` of a group, and their
``all_gather_outputs`` and ``_unsharded_param``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ...framework.core.torch_versions import fsdp_groups


def prepare_gathering(parts: Iterable[FSDPModule]) -> None:
    """Create the unsharded parameters of all units, without memory for their values. Collective.

    torch creates them in the first gather. They would be missing for a unit that no step runs, and an evaluation would
    create them as inference tensors, which training cannot use. A gather takes the memory of a unit twice; here at most
    one parameter at a time has memory, which nothing is written to.
    """
    for part in parts:
        records = [(record, group.device) for group in fsdp_groups(part) for record in group.fsdp_params]
        if any(hasattr(record._sharded_local_tensor, "fsdp_post_all_gather") for record, _ in records):
            # A tensor subclass builds them from values that are gathered.
            part.unshard()
            part.reshard()
            continue
        for record, device in records:
            _prepare(record, device)


def _prepare(record: Any, device: torch.device) -> None:
    shard = record._sharded_param_data
    # Replicated parameters have a mesh without a dim of shards.
    size = getattr(record.mesh_info, "shard_mesh_size", 1)
    record.init_all_gather_outputs([shard.numel()], [record.param_dtype or shard.dtype], size, device)
    record.init_unsharded_param()
    record.free_unsharded_param()
