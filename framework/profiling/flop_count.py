"""``FlopCount``: the model FLOPs of forward passes, with those of their backward passes, while it is entered.

An operation is counted by torch's formulas when the forward pass calls it. Its backward pass needs as many FLOPs again
for each operand that requires a gradient. So operations of a backward pass are left out, and activations that it
recomputes are not counted twice: the sum is that of the model, not that of the hardware.

Operations that torch has no formula for count as 0, such as elementwise ones and recurrent layers on a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ..core.torch_internals import TorchDispatchMode, is_in_backward

_aten = torch.ops.aten
# The operands of matrix products. An operation that is not listed, such as attention, takes twice the FLOPs of its
# forward pass for its backward pass if any of its tensors requires a gradient.
_OPERANDS: dict[Any, slice] = {
    _aten.mm: slice(0, 2),
    _aten.bmm: slice(0, 2),
    _aten.addmm: slice(1, 3),
    _aten.baddbmm: slice(1, 3),
    _aten._scaled_mm: slice(0, 2),
    _aten.convolution: slice(0, 2),
}
_FUNCTION_FILE = sys.modules[torch.autograd.Function.__module__].__file__


class FlopCount(TorchDispatchMode):
    """Counts FLOPs while it is entered. It may be entered several times.

    Results do not change. An operation takes some microseconds more.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flops = 0.0
        self._failed = self._is_paused = False
        self._formulas = _formulas()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let functions that the user has compiled run as compiled code, of which nothing is counted."""
        return True

    @property
    def total(self) -> float | None:
        """The FLOPs counted so far; None if nothing was counted, or a formula has failed."""
        return None if self._failed or not self._flops else self._flops

    def clear(self) -> None:
        """Forget what was counted."""
        self._flops = 0.0

    @contextmanager
    def paused(self) -> Generator[None, None, None]:
        """Leave out what is computed within, such as the update of an optimizer."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def fail(self) -> None:
        """Give up: what was counted is not complete."""
        self._failed = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        _count_changes(func, args)
        operation = getattr(func, "overloadpacket", func)
        formula = self._formulas.get(operation)
        # In a backward pass the current graph task has a number.
        if formula is not None and not self._is_paused and not is_in_backward():
            try:
                self._flops += formula(*args, **kwargs, out_val=output) * (1 + _gradients(operation, args))
            except Exception:  # a formula of another version of torch, or the user's own; training continues
                self.fail()
        return output


def _count_changes(func: Any, args: tuple[Any, ...]) -> None:
    """Count the changes of tensors in lists, as of ``torch._foreach_mul_``: torch does not in a mode.

    By these counts autograd notices that a tensor it needs was changed, and engines that weights were.
    """
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return
    for argument, value in zip(schema.arguments, args, strict=False):
        if isinstance(value, list | tuple) and argument.alias_info is not None and argument.alias_info.is_write:
            increment_version([each for each in value if not each.is_inference()])


def _gradients(operation: Any, args: tuple[Any, ...]) -> int:
    """Return how often the backward pass of an operation takes the FLOPs of its forward pass."""
    if not torch.is_grad_enabled():
        # Inside of an autograd function, whose inputs require gradients without it being visible here.
        return 2 if _in_autograd_function() else 0
    operands = _OPERANDS.get(operation)
    if operands is not None:
        return sum(tensor.requires_grad for tensor in args[operands])
    return 2 if any(isinstance(each, Tensor) and each.requires_grad for each in args) else 0


def _in_autograd_function() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename == _FUNCTION_FILE:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _formulas() -> dict[Any, Callable[..., int]]:
    # Imported by fits alone: it looks for Triton, which takes tens of milliseconds.
    from torch.utils.flop_counter import flop_registry, sdpa_flop

    found = dict(flop_registry)
    on_cpu = getattr(_aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if on_cpu is not None and on_cpu not in found:
        found[on_cpu] = found.get(_aten._scaled_dot_product_flash_attention, sdpa_flop)
    return found
