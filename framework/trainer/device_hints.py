"""Advice about settings of torch that are the user's to choose: for speed on a GPU, and for numbers in fp16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..core.split_optimizer import optimizers_in

# The first generation of tensor cores that multiplies in TF32.
_TF32_CAPABILITY = (8, 0)
# Half of the smallest number above zero in fp16: what is less is rounded to zero.
_ZERO_IN_FP16 = 2.0**-25
_WITH_FUSED_FORM = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def device_hints(device: torch.device, computes_in_fp32: bool, optimizers: Iterable[Optimizer]) -> Iterator[str]:
    """Yield a sentence for each setting that could be faster on a GPU, and for an ``eps`` that is zero in fp16.

    Args:
        device: the rank's device.
        computes_in_fp32: whether matrix products are in float32.
        optimizers: those of the module.
    """
    parts = [part for optimizer in optimizers for part in optimizers_in(optimizer)]
    groups = [(part, group) for part in parts for group in part.param_groups if _loses_eps(group)]
    if groups:
        part, group = groups[0]
        yield (
            f"{type(part).__name__}(eps={group['eps']:g}) divides by zero, as its eps is 0 in float16, the dtype of "
            "the weights: use precision='16-mixed' or 'bf16-true', or an eps such as 1e-4."
        )
    if device.type != "cuda":
        return
    is_default = torch.get_float32_matmul_precision() == "highest"
    if computes_in_fp32 and is_default and torch.cuda.get_device_capability(device) >= _TF32_CAPABILITY:
        yield (
            "This GPU multiplies float32 matrices several times as fast in TF32, with 10 bits of precision: call "
            "torch.set_float32_matmul_precision('high') if that suffices."
        )
    slow = [part for part in parts if _could_be_fused(part)]
    if slow:
        yield (
            f"torch.optim.{type(slow[0]).__name__}(fused=True) updates in one pass over the weights, and needs less "
            "memory than the default."
        )


def _could_be_fused(optimizer: Optimizer) -> bool:
    # Any other value than None was chosen by the user.
    is_default = all(group.get(name) is None for group in optimizer.param_groups for name in ("fused", "foreach"))
    return type(optimizer) in _WITH_FUSED_FORM and is_default


def _loses_eps(group: Mapping[str, Any]) -> bool:
    eps = group.get("eps")
    is_lost = isinstance(eps, float) and 0.0 < eps <= _ZERO_IN_FP16
    return is_lost and any(parameter.dtype == torch.float16 for parameter in group["params"])
