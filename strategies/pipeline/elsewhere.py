"""Parameters of the stages of other ranks: their shapes without values, and an error for code that needs more.

They are on the meta device. What a user's code computes from one, or reads as its gradient, would be missing on this
rank and present on another, which then go on with different numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...framework.core.errors import ConfigurationError

_OWN = __name__.partition(".strategies.")[0]
_METADATA = {"size", "numel", "dim", "stride", "is_floating_point", "is_complex", "element_size", "requires_grad_"}
_METADATA |= {"__len__", "__hash__", "__repr__", "__format__", "nelement", "ndimension", "type", "is_contiguous"}
_GRADIENT: Any = Tensor.grad
_DATA: Any = Tensor.data
_VALUES = _GRADIENT.__get__, _GRADIENT.__set__, _DATA.__get__, _DATA.__set__


class Elsewhere(nn.Parameter):
    """A parameter that another rank of the pipeline holds."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what a user's code computes from the parameter; its shape and the like are known."""
        name = getattr(func, "__name__", "")
        needs_values = func in _VALUES if name in ("__get__", "__set__") else name not in _METADATA
        if needs_values and _is_called_by_user():
            raise ConfigurationError(
                "this code uses the values or the gradient of a parameter that another stage of the pipeline holds, "
                "and ranks have no others than those of their own stage: use strategy='fsdp' or 'ddp', or leave out "
                "parameters with is_meta and expect results for the stage of each rank."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _is_called_by_user() -> bool:
    """Whether the next caller that belongs neither to torch nor to the standard library is not phalanx itself."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.optim."):
            # Steps and zero_grad, which leave out what has no gradient.
            return False
        top = module.partition(".")[0]
        if top != "torch" and top not in sys.stdlib_module_names:
            return not module.startswith(f"{_OWN}.")
        frame = frame.f_back
    return False


def mark_elsewhere(module: nn.Module, owners: Mapping[int, int | None], own: int) -> None:
    """Guard the parameters of a module that only another rank holds."""
    for parameter in module.parameters():
        if owners[id(parameter)] not in (None, own) and type(parameter) is nn.Parameter:
            # No ordinary way: an optimizer and the modules hold the parameter.
            parameter.__class__ = Elsewhere


def unmark(module: nn.Module) -> None:
    """Undo ``mark_elsewhere``, at the end of a stage; the parameters stay on the meta device."""
    for parameter in module.parameters():
        if type(parameter) is Elsewhere:
            # No ordinary way: the user's object, which modules hold, gets its own class back.
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]


def check_hooks(parameters: Iterable[Tensor], modules: Iterable[nn.Module]) -> None:
    """Refuse hooks on the gradients of parameters and modules: a pipeline would call them for each micro-batch.

    Raises:
        ConfigurationError: there are such hooks.
    """
    hooked = any(each._backward_hooks or getattr(each, "_post_accumulate_grad_hooks", None) for each in parameters)
    parts = [part for part in modules if part._backward_hooks or part._backward_pre_hooks]
    if hooked or parts:
        what = f"{type(parts[0]).__name__} has a backward hook" if parts else "a parameter has a hook on its gradient"
        raise ConfigurationError(
            f"{what}, which a pipeline would call for the gradients of single micro-batches, on the rank of one stage: "
            "change gradients in on_before_optimizer_step, or use strategy='fsdp' or 'ddp'."
        )
