"""Temporary memory of an update by torch's optimizers.

Their default on CUDA, ``foreach``, updates all parameters of a group at once and holds intermediate results of the
group's size, where fused kernels hold none and a loop over the parameters holds those of one parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer


def update_bytes(optimizers: Iterable[Optimizer], device_type: str) -> int:
    """Return the bytes of the largest update of one parameter group: groups are updated one after the other."""
    return max((_of_group(each, group, device_type) for each in optimizers for group in each.param_groups), default=0)


def _of_group(optimizer: Optimizer, group: dict[str, Any], device_type: str) -> int:
    # The default is foreach on CUDA unless `differentiable`; other optimizers have no such setting.
    foreach = group.get("foreach", False)
    if foreach is None:
        foreach = device_type == "cuda" and not group.get("differentiable")
    if not foreach or group.get("fused"):
        return 0
    size: int = sum(each.numel() * each.element_size() for each in group["params"] if each.requires_grad)
    return _copies(optimizer, group) * size


def _copies(optimizer: Optimizer, group: dict[str, Any]) -> int:
    """Return how many results of the size of the gradients exist at a time."""
    if isinstance(optimizer, torch.optim.SGD):
        # It works in place, but copies gradients to add the weight decay or to change their sign.
        return int(bool(group.get("weight_decay") or group.get("maximize")))
    # Such a copy, which is dropped again, and after it a root of the second moments or the like.
    return 1
