"""Refuses ``torch.nn.utils.clip_grad_norm_`` for parameters whose gradients DeepSpeed's engine holds.

It reads ``parameter.grad``, which does not exist there, so it would return 0 and clip nothing, without an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from ...framework.core.errors import ConfigurationError

# Where torch's function is imported from differs, but every caller runs this part of it, with the parameters.
_PART = "_clip_grads_with_norm_"
_ORIGINAL: list[Callable[..., None]] = []


def refuse_torch_clipping() -> None:
    """Raise a ``ConfigurationError`` in ``clip_grad_norm_`` for parameters of an engine. Others are clipped."""
    if not _ORIGINAL:
        _ORIGINAL.append(getattr(clip_grad, _PART))
        setattr(clip_grad, _PART, _clip)


def allow_torch_clipping() -> None:
    """Undo ``refuse_torch_clipping``."""
    if _ORIGINAL:
        setattr(clip_grad, _PART, _ORIGINAL.pop())


def _clip(parameters: Any, *args: Any, **options: Any) -> None:
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        # The attributes by which stages 1 and 2, and stage 3, mark parameters.
        if hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_id"):
            raise ConfigurationError(
                "torch.nn.utils.clip_grad_norm_ clips parameter.grad, which does not exist under DeepSpeed, whose "
                "engine holds the gradients: use fabric.clip_gradients(module, optimizer, max_norm=...), and in a "
                "Trainer gradient_clip_val or self.clip_gradients(optimizer, ...)."
            )
    _ORIGINAL[0](parameters, *args, **options)
