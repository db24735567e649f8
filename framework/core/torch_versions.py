"""Differences between the versions of torch that are supported, 2.11 and later. No other module asks for a version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def fsdp_groups(state: Any) -> list[Any]:
    """Return the parameter groups in the state of a module on which ``fully_shard`` was called.

    Empty if the module has no parameters.
    """
    # A list since torch 2.12; before that one group, or None.
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def drop_unsharded_gradient(record: Any) -> None:
    """Drop the gradient that FSDP's record of a parameter accumulated without reduction."""
    record.unsharded_param.grad = None
    # Since torch 2.15 the same gradient, without a setter; before that one in the dtype of the reduction.
    if record.unsharded_accumulated_grad is not None:
        record.unsharded_accumulated_grad = None


def can_abandon_fsdp_passes(kind: type) -> bool:
    """Whether modules of the class ``FSDPModule`` can be brought back from within a pass to the state before it."""
    # torch 2.11 cannot, 2.13 can.
    return hasattr(kind, "reset_iter_state")


def existing_dtypes(names: Iterable[str]) -> dict[str, torch.dtype]:
    """Return the dtypes that this torch has, by name."""
    return {name: getattr(torch, name) for name in names if hasattr(torch, name)}
