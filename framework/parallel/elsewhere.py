"""Parameters whose values other ranks hold: shapes on the meta device, and an error for code that needs more.

What a user's code computes from one, or reads as its gradient, would be missing on this rank and present on another.
Subclasses say why they have no values.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.errors import ConfigurationError

_OWN = __name__.partition(".framework.")[0]
_METADATA = {"size", "numel", "dim", "stride", "is_floating_point", "is_complex", "element_size", "requires_grad_"}
_METADATA |= {"__len__", "__hash__", "__repr__", "__format__", "nelement", "ndimension", "type", "is_contiguous"}
_GRADIENT: Any = Tensor.grad
_DATA: Any = Tensor.data
_VALUES = _GRADIENT.__get__, _GRADIENT.__set__, _DATA.__get__, _DATA.__set__


class Elsewhere(Tensor):
    """A tensor that this rank does not hold."""

    sentence: ClassVar[str]
    """The error for code of the user's that needs its values: why this rank lacks them, and what to do instead."""
    passes_on: ClassVar[Collection[str]] = ()
    """Functions that may be called, of which a result lacks its values too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what a user's code computes from the tensor; its shape and the like are known."""
        name = getattr(func, "__name__", "")
        needs_values = func in _VALUES if name in ("__get__", "__set__") else name not in _METADATA
        if name not in cls.passes_on and needs_values and is_called_by_user():
            raise cls.error()
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if name in cls.passes_on:
                result = result.as_subclass(cls)
            return result

    @classmethod
    def error(cls) -> ConfigurationError:
        """Return the error for code that needs the values."""
        return ConfigurationError(cls.sentence)


class NotGathered(Elsewhere, nn.Parameter):
    """A parameter that another rank has got at the end of a stage."""

    sentence = (
        "this code uses the values of a parameter after the stage, whose end gathers the weights on rank 0, and this "
        "is another rank: use them where trainer.is_global_zero is true, load the checkpoint, or pass "
        "gather_weights='all' to the strategy if it is FSDPStrategy or DeepSpeedStrategy."
    )
    # ``state_dict`` calls it.
    passes_on = ("detach",)


def is_called_by_user() -> bool:
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


def guard_absent(module: nn.Module) -> None:
    """Let the parameters that are left on the meta device refuse what a user's code computes from them."""
    for parameter in module.parameters():
        if type(parameter) is nn.Parameter and parameter.is_meta:
            # No ordinary way: an optimizer and the modules hold the parameter.
            parameter.__class__ = NotGathered


def unguard(module: nn.Module, kind: type[Elsewhere] = NotGathered) -> None:
    """Make parameters of a class ordinary ones again; they stay on the meta device."""
    for parameter in module.parameters():
        if isinstance(parameter, kind):
            # No ordinary way: the user's object, which modules hold, gets its own class back.
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
