"""Checks of features that strategies with sharded gradients do not support, before torch fails in the first step."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from ..framework.core.errors import ConfigurationError

# With these the update of an element depends on others of its tensor, of which each rank holds only a part.
NEED_WHOLE_TENSORS = ("LBFGS", "SparseAdam", "Adafactor", "Muon")


def check_dense(module: nn.Module, strategy: str) -> None:
    """Refuse layers whose gradients are sparse tensors.

    Raises:
        ConfigurationError: the module has such a layer; the message names it.
    """
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ConfigurationError(
                f"{name or 'the module'} is an {type(part).__name__}(sparse=True), and strategy={strategy!r} splits "
                "gradients, which sparse ones cannot be: leave sparse=True out, or use strategy='ddp'."
            )


def check_elementwise(optimizer: Optimizer, strategy: str) -> None:
    """Refuse optimizers that need full tensors.

    Raises:
        ConfigurationError: the optimizer needs full tensors.
    """
    if {kind.__name__ for kind in type(optimizer).__mro__} & set(NEED_WHOLE_TENSORS):
        raise ConfigurationError(
            f"{type(optimizer).__name__} needs full tensors, and strategy={strategy!r} leaves each rank a part of "
            "them: use an optimizer that updates each element independently, such as AdamW, or strategy='ddp'."
        )
