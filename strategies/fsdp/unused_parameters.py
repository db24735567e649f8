"""Parameters that a rank has not used in a backward pass that reduces gradients, while other ranks may have.

torch's FSDP reduces those gradients of a module that a rank has. Where ranks use different parameters of one module, it
adds up the gradients of different parameters, without an error if their sizes match. So a rank that has run a module
reduces a gradient for each of its parameters: zeros for those that it does not have. A reduced gradient of a parameter
that no rank has used is dropped again.

torch's own ``set_reduce_scatter_unused_params`` leaves such zeros as gradients, by which the optimizer would update the
parameters that no rank has used. So ``post_backward`` of a group is wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from ...framework.core.torch_versions import fsdp_groups
from ...framework.distributed.world import World
from ...framework.parallel.use_over_ranks import UseOverRanks


class UnusedParameters:
    """Completes the gradients of all sharded modules before they are reduced.

    Args:
        parts: the sharded modules.
        world: the ranks.
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
            for group in fsdp_groups(part):
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
