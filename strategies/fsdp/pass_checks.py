"""Passes that sharded weights cannot have: torch's FSDP would fail without a reason, or compute wrong gradients.

``pre_forward`` and ``pre_backward`` of a group of parameters are wrapped, as torch calls no hook of the user's there.
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
from ...framework.core.torch_internals import is_in_backward
from ...framework.core.torch_versions import fsdp_groups
from ...framework.parallel.meta_device import owners_of
from ...framework.parallel.step_flags import RunOrder


class PassChecks(RunOrder):
    """Checks of the forward and backward passes of all sharded modules.

    Args:
        root: the outermost module, which holds its sharded parameters.
        parts: the sharded modules.
        ran: takes the numbers of the modules that run with gradients, from 1.
    """

    def __init__(self, root: nn.Module, parts: Iterable[FSDPModule], ran: set[int]) -> None:
        super().__init__()
        self._ran = ran
        owners = owners_of(root)
        self._calls: Counter[nn.Module] = Counter()
        for number, part in enumerate(parts, 1):
            for group in fsdp_groups(part):
                places = [(record, *owners[id(record.sharded_param)][0]) for record in group.fsdp_params]
                group.pre_forward = partial(self._before_forward, number, places, group.pre_forward)
                group.pre_backward = partial(_before_backward, group.pre_backward)

    def forget(self) -> None:
        """Forget the forward passes so far, whose backward passes have run, or never will."""
        self._calls.clear()

    def _before_forward(
        self,
        number: int,
        places: list[tuple[Any, nn.Module, str]],
        pre_forward: Callable[..., Any],
        module: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        for record, owner, name in places:
            now = owner._parameters.get(name)
            if now is not record.sharded_param and now is not record.unsharded_param:
                raise ConfigurationError(
                    f"{name} of a {type(owner).__name__} is another tensor than the strategy has sharded, as "
                    "under torch.func.functional_call or after an assignment, and the sharded one would take its "
                    "place: replace parameters in configure_model, and write values into them with copy_."
                )
        # Other forms of recomputation happen after `pre_backward`, and do not come here. No public name tells whether a
        # backward pass is running: `queue_callback` of the engine, which raises outside of one, would leave a callback.
        if not is_in_backward():
            self._calls[module] += 1
            self.note(number)
            if torch.is_grad_enabled():
                self._ran.add(number)
        elif self._calls[module] > 1:
            kind = type(module).__name__.removeprefix("FSDP")
            raise ConfigurationError(
                f"a {kind} runs twice in one step under torch.utils.checkpoint with "
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
