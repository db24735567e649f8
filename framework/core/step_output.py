"""The output of ``training_step``: extracting and checking the loss, and detaching the output for hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .errors import LoopError

_RULE = "training_step must return a scalar loss, a mapping with 'loss', or None"


def loss_of(output: Any) -> Tensor | None:
    """Return the loss; None if the step skips its batch.

    Raises:
        LoopError: the loss is not a tensor, or the mapping has no loss.
    """
    if output is None:
        return None
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(output, Mapping) and "loss" not in output:
        raise LoopError(f"training_step returned a mapping without 'loss' (it has {sorted(output)}). {_RULE}.")
    if loss is not None and not isinstance(loss, Tensor):
        raise LoopError(f"training_step returned a {type(loss).__name__}. {_RULE}.")
    return loss


def check_loss(loss: Tensor) -> None:
    """Check the first loss of a run; later losses have the same shape and graph.

    Raises:
        LoopError: the loss is not a single number, or does not depend on a parameter that requires a gradient.
    """
    if loss.numel() != 1:
        raise LoopError(f"training_step returned a loss of shape {tuple(loss.shape)}. {_RULE}: take its mean().")
    if not loss.requires_grad:
        raise LoopError(
            "training_step returned a loss that does not depend on any parameter, so there is nothing to train. "
            "Compute it from the module's output without detach(), item() or no_grad(), and check that parameters "
            "require gradients."
        )


def outputs_for_hooks(output: Any) -> Any:
    """Return the output without its graph."""
    if output.__class__ is Tensor:
        return {"loss": output.detach()}
    if isinstance(output, Mapping):
        return {key: value.detach() if isinstance(value, Tensor) else value for key, value in output.items()}
    return output
