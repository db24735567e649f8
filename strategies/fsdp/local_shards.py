"""The part of a sharded tensor that this rank holds, its place in the full tensor, and the way back."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def _is_shown(record: logging.LogRecord) -> bool:
    """Return False for torch's warning that it gathers a tensor along one axis after another: no value changes."""
    return not (record.msg.startswith("While redistributing") and "all_gather" in (record.args or ()))


# Full tensors are gathered from parts of parts, once at the end of a run.
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_shown)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory."""
    # The public `to_local` returns a view of a parameter's shard: assigning memory to it would not reach the parameter.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def shape_and_offsets(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offsets of this rank's shard in the full tensor."""
    # The protocol by which torch's checkpoints ask tensors for their shards.
    (chunk,) = tensor.__create_chunk_list__()
    # The offset of a rank without any row is beyond the end.
    return tuple(chunk.sizes), tuple(min(each, size) for each, size in zip(chunk.offsets, tensor.shape, strict=True))


def whole_of_parts(tensor: Tensor) -> Tensor:
    """Return a full tensor, gathered if it is sharded. Collective."""
    whole: Tensor = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def like(parameter: DTensor, local: Tensor) -> DTensor:
    """Return a tensor with the full shape and sharding of a parameter, of which this rank holds ``local``."""
    if local.device.type != parameter.device_mesh.device_type:
        # `from_local` would move a shard that is kept on the CPU to the device of the mesh. The protocol by which
        # torch's compiler takes tensors apart leaves it where it is.
        pattern: Any = parameter.detach()
        if pattern.dtype != local.dtype:
            pattern = torch.empty_like(pattern, dtype=local.dtype, device="meta")
        names, context = pattern.__tensor_flatten__()
        parts = {name: local.detach() if isinstance(part := getattr(pattern, name), Tensor) else part for name in names}
        built: DTensor = DTensor.__tensor_unflatten__(parts, context, parameter.shape, parameter.stride())
        return built
    return DTensor.from_local(
        local.detach(),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
