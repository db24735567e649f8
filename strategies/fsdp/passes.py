"""Passes of sharded modules: parameters that a rank has not used in one, and passes that sharded weights cannot have.

torch's FSDP reduces those gradients of a module that a rank has. Where ranks use different parameters of one module, it
adds up the gradients of different parameters, without an error if their sizes match. So a rank that has run a module
reduces a gradient for each of its parameters: zeros for those that it does not have. A reduced gradient of a parameter
that no rank has used is dropped again.

torch's own ``set_reduce_scatter_unused_params`` leaves such zeros as gradients, by which the optimizer would update the
parameters that no rank has used. So ``post_backward`` of a group is wrapped, and for the checks ``pre_forward`` and
``pre_backward``, as torch calls no hook of the user's there.
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
from ...framework.distributed.world import World
from ...framework.parallel.meta_device import owners_of
from ...framework.parallel.step_flags import RunOrder
from ...framework.parallel.use_over_ranks import UseOverRanks
from .torch_fsdp import groups_of


class UnusedParameters:
    """Completes the gradients of all sharded modules before they are reduced.

    Args:
        parts: the sharded modules.
    """

    def __init__(self, parts: Iterable[FSDPModule], world: World) -> None:
        self.ran: set[int] = set()
        """The numbers of the modules, from 1, that have run with gradients in this step and those before it whose
        gradients are not reduced yet."""
        self._records: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._missing: set[int] = set()
        """The numbers of the parameters that this rank has not used, and whose gradients it has filled with zeros."""
        self._untouched: set[int] = set()
        """The ``id`` of the records that had no gradient before a backward pass that uses no parameter."""
        self._reduces = self._is_settled = False
        for number, part in enumerate(parts, 1):
            for group in groups_of(part):
                group.post_backward = partial(self._before_reduction, number, group, group.post_backward)
                for record in group.fsdp_params:
                    self._numbers[id(record)] = len(self._records)
                    self._records.append(record)
        self._use = UseOverRanks(world, len(self._records))

    def begin_step(self) -> None:
        """Begin the outermost forward pass, which several backward passes may follow."""
        if self._is_settled:
            self._is_settled = False
            self.ran.clear()

    def begin_pass(self) -> None:
        """Begin a backward pass."""
        self._untouched.clear()
        if not self._use.counts_pass():
            self._untouched.update(
                id(record)
                for record in self._records
                if record.unsharded_param.grad is None and record.unsharded_accumulated_grad is None
            )

    def forget(self) -> None:
        """Forget the backward passes since ``settle``: their gradients were dropped."""
        self._reduces = False
        self._missing.clear()

    def _before_reduction(self, number: int, group: Any, post_backward: Callable[..., Any], *args: Any) -> Any:
        if self._untouched:
            for record in group.fsdp_params:
                if id(record) in self._untouched:
                    record.unsharded_param.grad = None
        if self._missing:
            self._missing.difference_update(
                self._numbers[id(record)] for record in group.fsdp_params if record.unsharded_param.grad is not None
            )
        if not group.reduce_grads:
            return post_backward(*args)
        self._reduces = True
        if number in self.ran:
            fresh = [record for record in group.fsdp_params if record.unsharded_accumulated_grad is None]
            has_others = len(fresh) < len(group.fsdp_params)
            if has_others or any(record.unsharded_param.grad is None for record in fresh):
                self._complete(group, fresh)
        return post_backward(*args)

    def _complete(self, group: Any, fresh: Iterable[Any]) -> None:
        """Give each parameter of a group a gradient, all in one dtype; ``fresh``: those that accumulated none before.

        Gradients of a lower dtype are accumulated in that of the reduction, to which those of this pass are added.
        """
        kept = [record.unsharded_accumulated_grad for record in group.fsdp_params]
        dtype = next((gradient.dtype for gradient in kept if gradient is not None), None)
        for record in fresh:
            parameter = record.unsharded_param
            gradient = parameter.grad
            if gradient is None:
                if not parameter.requires_grad:
                    continue
                gradient = torch.zeros_like(parameter, dtype=dtype)
                if record.sharded_param.grad is None:
                    self._missing.add(self._numbers[id(record)])
            if dtype is None:
                parameter.grad = gradient
            else:
                parameter.grad, record.unsharded_accumulated_grad = None, gradient.to(dtype)

    def settle(self) -> None:
        """Drop the gradients that no rank has computed, if gradients were reduced since the last call. Collective."""
        if not self._reduces:
            return
        missing, self._missing = self._missing, set()
        self._reduces, self._is_settled = False, True
        for number in self._use.unused(missing) or ():
            if number in missing:
                self._records[number].sharded_param.grad = None


class PassChecks(RunOrder):
    """Refuses passes in which torch would fail without a reason, or compute wrong gradients, in all sharded modules.

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
            for group in groups_of(part):
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
