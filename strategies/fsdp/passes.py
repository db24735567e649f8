"""Derivatives that sharded weights cannot have: torch's FSDP would fail without a reason, or compute wrong ones.

Private names of torch's FSDP are used: ``pre_forward`` and ``pre_backward`` of a group of parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ...framework.core.errors import ConfigurationError
from ...framework.core.torch_versions import fsdp_groups


class PassChecks:
    """Checks of the forward and backward passes of all sharded modules.

    Args:
        parts: the sharded modules.
    """

    def __init__(self, parts: Iterable[FSDPModule]) -> None:
        self._calls: Counter[nn.Module] = Counter()
        for part in parts:
            for group in fsdp_groups(part):
                group.pre_forward = partial(self._before_forward, group.pre_forward)
                group.pre_backward = partial(_before_backward, group.pre_backward)

    def forget(self) -> None:
        """Forget the forward passes so far, whose backward passes have run, or never will."""
        self._calls.clear()

    def _before_forward(self, pre_forward: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        # Other forms of recomputation happen after `pre_backward`, and do not come here.
        if torch._C._current_graph_task_id() == -1:
            self._calls[module] += 1
        elif self._calls[module] > 1:
            raise ConfigurationError(
                f"a {type(module).__name__} runs twice in one step under torch.utils.checkpoint with use_reentrant=True, "
                "and its gradients would be wrong where weights are sharded: give use_reentrant=False."
            )
        return pre_forward(module, args, kwargs)


def _before_backward(pre_backward: Callable[..., Any], *args: Any) -> Any:
    if torch.is_grad_enabled():
        raise ConfigurationError(
            "a derivative was computed with create_graph=True, as for a gradient penalty or forces, and its own "
            "derivative needs weights that are sharded again by then: use strategy='zero2', which divides gradients "
            "and optimizer state, or strategy='ddp'."
        )
    return pre_backward(*args)
