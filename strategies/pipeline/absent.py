"""``Absent``: the hidden states of a stage that another rank computes: shape and dtype without values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ...framework.core.errors import LoopError


class Absent(Tensor):
    """A tensor on the meta device. Whatever is computed from it is absent too, so it cannot become part of a loss."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute shapes only. Other operands are moved to the meta device."""

        def moved(leaf: Any) -> Any:
            return leaf.to("meta") if isinstance(leaf, Tensor) and not leaf.is_meta else leaf

        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") in _READS:
                raise no_value()
            given, named = tree_map(moved, tuple(args)), tree_map(moved, kwargs or {})
            return tree_map(lambda leaf: _absent(leaf), func(*given, **named))


_READS = ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")


def absent_like(tensor: Tensor) -> Tensor:
    """Return an absent tensor of the shape and dtype of a tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.empty_like(tensor, device="meta", requires_grad=False).as_subclass(Absent)


def no_value() -> LoopError:
    """Return the error for a value that another stage of the pipeline computes."""
    return LoopError(
        "the step reads a value that depends on the output of a block which another stage of the pipeline computes, "
        "other than through the blocks that follow it: let the loss and the logged values depend on the output of the "
        "last block only, or use strategy='ddp' or 'fsdp'."
    )


def _absent(leaf: Any) -> Any:
    return leaf.as_subclass(Absent) if isinstance(leaf, Tensor) and leaf.is_meta else leaf
