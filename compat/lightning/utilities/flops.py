"""Counts of floating-point operations."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

__all__ = ["measure_flops"]


def measure_flops(
    model: nn.Module, forward_fn: Callable[[], Tensor], loss_fn: Callable[[Tensor], Tensor] | None = None
) -> int:
    """Return the floating-point operations of a forward pass and, with ``loss_fn``, of its backward pass.

    Build the model and its inputs on the meta device to count without computing.

    Args:
        model: the module that ``forward_fn`` calls; gradients of its parameters are not kept.
        forward_fn: runs a forward pass and returns its output.
        loss_fn: computes the loss from the output.
    """
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in kept:
        parameter.grad = None  # backward would add to a gradient in place
    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    for parameter, gradient in kept:
        parameter.grad = gradient
    return int(counter.get_total_flops())
