"""``lightning.pytorch.utilities.grads``: norms of gradients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["grad_norm"]


def grad_norm(module: nn.Module, norm_type: float | int | str, group_separator: str = "/") -> dict[str, Tensor]:
    """Return the norm of each parameter's gradient, and of all gradients together.

    Under a strategy that shards parameters use the callback ``GradientNormMonitor``, which combines the ranks' parts.

    Args:
        module: the module whose gradients are measured.
        norm_type: order p of the p-norm, or ``"inf"``.
        group_separator: stands between ``grad_{p}_norm`` and a parameter's name.

    Raises:
        ValueError: the order is not positive.
    """
    order = float(norm_type)
    if order <= 0:
        raise ValueError(f"norm_type={norm_type!r} is not allowed: give a number above 0, or 'inf'.")
    norms = {
        f"grad_{order}_norm{group_separator}{name}": torch.linalg.vector_norm(parameter.grad, order)
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.linalg.vector_norm(torch.stack(list(norms.values())), order)
    return norms
