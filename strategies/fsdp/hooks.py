"""Hooks on gradients of parameters that are sharded: they see the gradient after it is averaged over the ranks.

Code that registered a hook on the parameter before it was sharded, or registers one later on the sharded parameter,
gets what one process gives it. The gradient is a DTensor, which stands for the full tensor: see ``ordinary``. Each
backward pass then reduces its gradients, as a hook is called for each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .ordinary import Ordinary, as_shard


class GradientHooks:
    """The hooks on the gradients of a model's sharded parameters."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[nn.Parameter, dict[int, Callable[..., Any]]]] = {}
        self._parameters: list[nn.Parameter] = []
        self._own: list[RemovableHandle] = []
        self._kept: dict[int, Tensor] = {}
        self._from_autograd: set[int] = set()
        self._wait: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        return bool(self._tables)

    def wait_with(self, communication: Any) -> None:
        """Wait for the reductions of this context of torch's FSDP before a gradient is added to one of theirs."""
        streams = communication.reduce_scatter_stream, communication.all_reduce_stream

        def wait() -> None:
            current = communication.device_handle.current_stream()
            for stream in streams:
                current.wait_stream(stream)

        self._wait = wait

    def carry(self, given: nn.Parameter, parameter: nn.Parameter) -> None:
        """Move the hooks of a parameter to its sharded one; the handles of the user's code remove them there."""
        trained = parameter.requires_grad
        parameter.requires_grad_(True)
        self._own.append(parameter.register_hook(lambda gradient: self._arrived(parameter, gradient)))
        parameter.add_gradient_hook = lambda hook: self._add(parameter, hook)  # type: ignore[attr-defined]
        hooks: Any = given._backward_hooks
        if hooks:
            self._use(parameter, hooks)
        if given._post_accumulate_grad_hooks:
            table = getattr(parameter, "_post_accumulate_grad_hooks", None)
            if table is None:
                parameter._post_accumulate_grad_hooks = given._post_accumulate_grad_hooks
            else:
                table.update(given._post_accumulate_grad_hooks)
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

    def release(self) -> None:
        """Leave the parameters with the hooks of the user's code alone, which torch then calls."""
        for handle in self._own:
            handle.remove()
        for parameter in self._parameters:
            # No ordinary way: the attribute may be missing.
            vars(parameter).pop("add_gradient_hook", None)
            if id(parameter) in self._tables:
                parameter._backward_hooks = self._tables[id(parameter)][1]
        self._own, self._parameters, self._tables = [], [], {}

    @staticmethod
    def give_back(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """Move the hooks to the parameters that take the place of the sharded ones, by name."""
        for name, parameter in before.items():
            for table in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if getattr(parameter, table, None):
                    setattr(after[name], table, getattr(parameter, table))

    # ---- a backward pass --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Set the gradients of earlier passes aside, which the hooks have seen."""
        for key, (parameter, _) in self._tables.items():
            if parameter.grad is not None:
                self._kept[key], parameter.grad = parameter.grad, None

    def end(self) -> None:
        """Put back the gradients of parameters that this pass has not reached."""
        for key, kept in self._kept.items():
            parameter = self._tables[key][0]
            parameter.grad = kept if parameter.grad is None else kept.add_(parameter.grad)
        self._kept.clear()

    def _arrived(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        """Shard a gradient that comes from a use outside of the module that holds the parameter."""
        self._wait()
        self._from_autograd.add(id(parameter))
        arrived: Tensor = self._called(parameter, as_shard(parameter, gradient))
        return arrived

    @torch.no_grad()
    def _reduced(self, parameter: nn.Parameter) -> None:
        if id(parameter) in self._from_autograd:
            self._from_autograd.discard(id(parameter))
            return
        assert parameter.grad is not None
        gradient, kept = self._called(parameter, parameter.grad), self._kept.pop(id(parameter), None)
        parameter.grad = gradient if kept is None else kept.add_(gradient)

    def _called(self, parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        hooks = tuple(self._tables.get(id(parameter), (parameter, {}))[1].values())
        paused = bool(hooks) and Ordinary.resume()
        try:
            for hook in hooks:
                result = hook(gradient)
                gradient = gradient if result is None else as_shard(parameter, result)
        finally:
            if paused:
                Ordinary.pause()
        return gradient
