"""Differences between the versions of torch that are supported, 2.6 and later. No other module asks for a version."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def fsdp_groups(part: Any) -> list[Any]:
    """Return the parameter groups of a module on which ``fully_shard`` was called; empty if it has no parameters."""
    state = part._get_fsdp_state()
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


def ignored_by_fsdp(parameters: set[nn.Parameter] | None) -> dict[str, Any]:
    """Return the arguments of ``fully_shard`` by which it leaves out parameters.

    Torch 2.6 does not know the argument, so it is only given where there are such parameters.
    """
    return {"ignored_params": parameters} if parameters else {}


def own_connection(store: Any) -> Any:
    """Return a second connection to a rendezvous store; before torch 2.8 the same one."""
    return store.clone() if hasattr(store, "clone") else store


def existing_dtypes(names: Iterable[str]) -> dict[str, torch.dtype]:
    """Return the dtypes that this torch has, by name."""
    return {name: getattr(torch, name) for name in names if hasattr(torch, name)}


def built_for_accelerator() -> bool:
    """Whether this build of torch knows an accelerator, such as CUDA."""
    try:
        return torch.accelerator.current_accelerator() is not None
    except RuntimeError:
        # Torch 2.6 raises an error instead of returning None.
        return False
