"""Passes outputs of any kind through DeepSpeed's hooks as they are.

DeepSpeed starts the work of a backward pass at the tensors that it finds in the output of a forward pass. It searches
only tuples, lists and dicts, and stage 3 replaces the tensors in them. Here hooks are set on the tensors themselves,
wherever they are, and the output stays the user's own object.

The names in ``parameter_offload`` are private to DeepSpeed; they were checked with 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...framework.parallel.strategy import StepAdapter, StepFunction
from ...framework.parallel.zero_backward import attributes_of, tensors_in

_PLAIN = (type(None), bool, int, float, str)


class _Tensors(tuple[Tensor, ...]):
    """The tensors in an output, in a container in which stage 3 does not replace them."""


class OutputAdapter(StepAdapter):
    """Gives DeepSpeed's hooks the tensors in the output of a step, in a container that they support."""

    is_running = False
    """Whether a step is running."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        # In a list, because nn.Module would register a bare module or parameter as one of its own.
        self._outputs: list[Any] = []

    def forward(self, step: StepFunction, *args: Any, **kwargs: Any) -> Any:
        """Call ``step``; return the tensors in its output, see ``take_output``."""
        self.is_running = True
        try:
            output = step(*args, **kwargs)
        finally:
            self.is_running = False
        self._outputs[:] = [output]
        return _Tensors(tensors_in(output))

    def take_output(self) -> Any:
        """Return the output of the step that has ended."""
        return self._outputs.pop()


def support_any_output() -> None:
    """Let stage 3 support modules that return other objects than tensors, tuples, lists and dicts."""
    from deepspeed.runtime.zero import parameter_offload

    if parameter_offload.apply_to_tensors_only is _apply_to_tensors:
        return
    _ORIGINAL.append(parameter_offload.apply_to_tensors_only)
    parameter_offload.apply_to_tensors_only = _apply_to_tensors
    # Its hook calls ``vars`` with the output, which raises for an object without attributes.
    parameter_offload.vars = attributes_of


def restore_output_support() -> None:
    """Undo ``support_any_output``."""
    from deepspeed.runtime.zero import parameter_offload

    if _ORIGINAL:
        parameter_offload.apply_to_tensors_only = _ORIGINAL.pop()
        del parameter_offload.vars


_ORIGINAL: list[Callable[..., Any]] = []


def _apply_to_tensors(function: Any, value: Any, warning_msg_fn: Any = None) -> Any:
    """Apply DeepSpeed's autograd function to all tensors, or hook those that it could not replace."""
    if _is_supported(value) or not _is_before_backward(function):
        # Without its hooks on inputs a module releases its parameters later, after the backward pass.
        return _ORIGINAL[0](function, value, warning_msg_fn)
    tensors = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
    if tensors and torch.is_grad_enabled():
        # The node of a tensor of DeepSpeed's function carries the work and its module, and counts it.
        node = function(torch.empty(0, requires_grad=True)).grad_fn
        for tensor in tensors:
            tensor.register_hook(lambda _: node.pre_backward_function(node.module))
    return value


def _is_before_backward(function: Any) -> bool:
    return getattr(getattr(function, "__self__", None), "__name__", "") == "PreBackwardFunctionForModule"


def _is_supported(value: Any) -> bool:
    kind = value.__class__
    if kind is Tensor or kind is nn.Parameter or kind in _PLAIN:
        return True
    if kind is tuple or kind is list:
        return all(_is_supported(one) for one in value)
    return kind is dict and all(_is_supported(one) for one in value.values())
