"""Hooks on gradients of parameters that are sharded: they see the gradient after it is averaged over the ranks.

Code that registered a hook on the parameter before it was sharded, or registers one later on the sharded parameter,
gets what one process gives it. The gradient is a DTensor, which stands for the full tensor: see ``full_semantics``.
With a hook, gradients are reduced in every backward pass instead of once per window, because the hook must run in each.

The tables of a parameter's hooks are private in torch, ``_backward_hooks`` and ``_post_accumulate_grad_hooks``. No
public name returns hooks, and the user's handles remove them from these tables.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .full_semantics import FullSemantics, as_shard

_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")


class GradientHooks:
    """The hooks on the gradients of a model's sharded parameters.

    Calls come in this order: ``carry`` for each parameter, ``wait_with``, ``begin`` and ``end`` around each backward
    pass, ``release``, and ``give_back`` once the parameters are full again.
    """

    def __init__(self) -> None:
        self._tables: dict[int, tuple[nn.Parameter, dict[int, Callable[..., Any]]]] = {}
        self._parameters: list[nn.Parameter] = []
        self._own: list[RemovableHandle] = []
        self._kept: dict[int, Tensor] = {}
        self._from_autograd: set[int] = set()
        self._wait: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        return bool(self._tables)

    # ---- in set-up --------------------------------------------------------------------------------------------------

    def carry(self, given: nn.Parameter, parameter: nn.Parameter) -> None:
        """Move the hooks of a parameter to its sharded one; the handles of the user's code remove them there."""
        if not (parameter.is_floating_point() or parameter.is_complex()):
            return  # integers, such as the codes of a quantized layer, have no gradient
        trained = parameter.requires_grad
        # torch registers no hook on a tensor without gradient, and a frozen parameter may be trained later.
        parameter.requires_grad_(True)
        self._own.append(parameter.register_hook(lambda gradient: self._of_direct_use(parameter, gradient)))
        parameter.add_gradient_hook = lambda hook: self._add(parameter, hook)  # type: ignore[attr-defined]
        hooks, later = (getattr(given, name, None) for name in _TABLES)
        if hooks:
            self._use(parameter, hooks)
        if later:
            table = getattr(parameter, _TABLES[1], None)
            if table is None:
                setattr(parameter, _TABLES[1], later)
            else:
                table.update(later)
        parameter.requires_grad_(trained)
        self._parameters.append(parameter)

    def _add(self, parameter: nn.Parameter, hook: Callable[..., Any]) -> RemovableHandle:
        if id(parameter) not in self._tables:
            self._use(parameter, OrderedDict())
        table = self._tables[id(parameter)][1]
        handle = RemovableHandle(table)
        table[handle.id] = hook
        return handle

    def _use(self, parameter: nn.Parameter, table: dict[int, Callable[..., Any]]) -> None:
        self._tables[id(parameter)] = parameter, table
        # torch's FSDP calls it after each reduction.
        self._own.append(parameter.register_post_accumulate_grad_hook(self._reduced))

    def wait_with(self, communication: Any) -> None:
        """Wait for the reductions of this context of torch's FSDP before a gradient is added to one of theirs."""
        streams = communication.reduce_scatter_stream, communication.all_reduce_stream

        def wait() -> None:
            current = communication.device_handle.current_stream()
            for stream in streams:
                current.wait_stream(stream)

        self._wait = wait

    # ---- a backward pass --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Move accumulated gradients aside, so that hooks see only this pass's."""
        for key, (parameter, _) in self._tables.items():
            if parameter.grad is not None:
                self._kept[key], parameter.grad = parameter.grad, None

    def end(self) -> None:
        """Put back the gradients of parameters that this pass has not reached."""
        for key, kept in self._kept.items():
            parameter = self._tables[key][0]
            parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)
        self._kept.clear()

    def _of_direct_use(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Wait for reductions, and call the hooks on a gradient of a use outside of the module with the parameter.

        Returns:
            The shard of the gradient, or what the hooks have made of it.
        """
        self._wait()
        self._from_autograd.add(id(parameter))
        return self._called(parameter, as_shard(parameter, gradient))

    @torch.no_grad()
    def _reduced(self, parameter: nn.Parameter) -> None:
        """Call the hooks on a gradient that was reduced, and add the gradients of earlier passes to it."""
        if id(parameter) in self._from_autograd:
            self._from_autograd.discard(id(parameter))
            return
        assert parameter.grad is not None
        gradient, kept = self._called(parameter, parameter.grad), self._kept.pop(id(parameter), None)
        parameter.grad = gradient if kept is None else kept.add_(gradient)

    def _called(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        hooks = tuple(self._tables.get(id(parameter), (parameter, {}))[1].values())
        with FullSemantics.on() if hooks else nullcontext():
            for hook in hooks:
                result = hook(gradient)
                gradient = gradient if result is None else as_shard(parameter, result)
        return gradient

    # ---- after the last step ----------------------------------------------------------------------------------------

    def release(self) -> None:
        """Remove phalanx's hooks and restore the user's in torch's table."""
        for handle in self._own:
            handle.remove()
        for parameter in self._parameters:
            # No ordinary way: the attribute may be missing.
            vars(parameter).pop("add_gradient_hook", None)
            if id(parameter) in self._tables:
                setattr(parameter, _TABLES[0], self._tables[id(parameter)][1])
        self._own, self._parameters, self._tables = [], [], {}

    @staticmethod
    def give_back(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Move the hooks to the parameters that take the place of the sharded ones, by name."""
        for name, parameter in before.items():
            for table in _TABLES:
                if getattr(parameter, table, None):
                    setattr(after[name], table, getattr(parameter, table))
