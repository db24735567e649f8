"""Passes that sharded weights cannot have: torch's FSDP would fail without a reason, or compute wrong gradients.

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
from ...framework.parallel.step_flags import RunOrder


class PassChecks(RunOrder):
    """Checks of the forward and backward passes of all sharded modules.

    Args:
        parts: the sharded modules.
        ran: takes the numbers of the modules that run with gradients, from 1.
    """

    def __init__(self, parts: Iterable[FSDPModule], ran: set[int]) -> None:
        super().__init__()
        self._ran = ran
        self._calls: Counter[nn.Module] = Counter()
        for number, part in enumerate(parts, 1):
            for group in fsdp_groups(part):
                group.pre_forward = partial(self._before_forward, number, group, group.pre_forward)
                group.pre_backward = partial(_before_backward, group.pre_backward)

    def forget(self) -> None:
        """Forget the forward passes so far, whose backward passes have run, or never will."""
        self._calls.clear()

    def _before_forward(
        self, number: int, group: Any, pre_forward: Callable[..., Any], module: Any, args: Any, kwargs: Any
    ) -> Any:
        for record in group.fsdp_params:
            place = record._module_info
            now = place.module._parameters.get(place.param_name)
            if now is not record.sharded_param and now is not record._unsharded_param:
                raise ConfigurationError(
                    f"{place.param_name} of a {type(place.module).__name__} is another tensor than the strategy has "
                    "sharded, as under torch.func.functional_call or after an assignment, and the sharded one would "
                    "take its place: replace parameters in configure_model, and write values into them with copy_."
                )
        # Other forms of recomputation happen after `pre_backward`, and do not come here.
        if torch._C._current_graph_task_id() == -1:
            self._calls[module] += 1
            self.note(number)
            if torch.is_grad_enabled():
                self._ran.add(number)
        elif self._calls[module] > 1:
            name = type(module).__name__.removeprefix("FSDP")
            raise ConfigurationError(
                f"a {name} runs twice in one step under torch.utils.checkpoint with "
                "use_reentrant=True, and its gradients would be wrong where weights are sharded: give "
                "use_reentrant=False."
            )
        return pre_forward(module, args, kwargs)


def _before_backward(pre_backward: Callable[..., Any], *args: Any) -> Any:
    if torch.is_grad_enabled():
        raise ConfigurationError(
            "a derivative was computed with create_graph=True, as for a gradient penalty or forces, and its own "
            "derivative needs weights that are sharded again at that time: use strategy='zero2', which divides "
            "gradients and optimizer state, or strategy='ddp'."
        )
    return pre_backward(*args)
