"""The parts of sharded tensors that this rank holds. A box is the part of a full tensor that this rank holds."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def _is_about_values(record: logging.LogRecord) -> bool:
    """Return False for torch's warning that a tensor is gathered along one axis after another: values are the same."""
    return not (record.msg.startswith("While redistributing") and "all_gather" in (record.args or ()))


# Full tensors are gathered from parts of parts, once at the end of a run.
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(_is_about_values)


def local_of(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def box_of(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and offsets of this rank's box of the full tensor."""
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    # The offset of a rank without any row is beyond the end.
    return tuple(shape), tuple(min(offset, size) for offset, size in zip(offsets, tensor.shape, strict=True))


def whole_of_parts(tensor: Tensor) -> Tensor:
    """Return a full tensor, gathered if it is sharded. Collective."""
    whole: Tensor = tensor.detach()
    return whole.full_tensor() if isinstance(whole, DTensor) else whole


def like(parameter: DTensor, local: Tensor) -> DTensor:
    """Return a tensor with the full shape and sharding of a parameter, of which this rank holds ``local``."""
    described = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=described)
    # `DTensor.from_local` would move a shard that is kept on the CPU to the device of the mesh.
    return DTensor(local.detach(), spec, requires_grad=False)


def box_in(whole: Tensor, shape: Sequence[int], offsets: Sequence[int]) -> Tensor:
    """Return the box of ``shape`` at ``offsets``, a view."""
    for dim, (start, size) in enumerate(zip(offsets, shape, strict=True)):
        whole = whole.narrow(dim, start, size)
    return whole
