"""Parameters whose values other ranks hold: shapes on the meta device, and an error for code that needs more.

What a user's code computes from one, or reads as its gradient, would be missing on this rank and present on another.
Subclasses say why they have no values.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..core.errors import ConfigurationError
from ..core.torch_internals import tree_leaves, tree_map_only, without_subclasses

_OWN = __name__.partition(".framework.")[0]
_METADATA = {"size", "numel", "dim", "stride", "is_floating_point", "is_complex", "element_size", "requires_grad_"}
_METADATA |= {"__len__", "__hash__", "__repr__", "__format__", "nelement", "ndimension", "type", "is_contiguous"}
_GRADIENT: Any = Tensor.grad
_DATA: Any = Tensor.data
_READS = {"item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__"}
_READS |= {"equal", "allclose", "backward", "cpu", "to"}
_VALUES = _GRADIENT.__get__, _GRADIENT.__set__, _DATA.__get__, _DATA.__set__


class Elsewhere(Tensor):
    """A tensor that this rank does not hold. Whatever a user's code computes from it is refused."""

    sentence: ClassVar[str]
    """The error for code of the user's that needs its values: why this rank lacks them, and what to do instead."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse code that needs the values; the shape and the like are known."""
        if cls.needs_values(func, (args, kwargs)) and is_called_by_user():
            raise cls.error()
        return without_subclasses(func, *args, **(kwargs or {}))

    @classmethod
    def needs_values(cls, func: Any, given: Any) -> bool:
        """Whether a function of torch needs the values of the tensors that it is given."""
        name = getattr(func, "__name__", "")
        return func in _VALUES if name in ("__get__", "__set__") else name not in _METADATA

    @classmethod
    def error(cls) -> ConfigurationError:
        """Return the error for code that needs the values."""
        return ConfigurationError(cls.sentence)


class NotGatheredValue(Elsewhere):
    """A tensor computed from weights that only another rank holds after a stage.

    Programs copy the weights on all ranks and use the copy on rank 0, so only what reads values is refused.
    """

    sentence = (
        "this code uses the values of a parameter after the stage, whose end gathers the weights on rank 0, and this "
        "is another rank: use them where trainer.is_global_zero is true, load the checkpoint, or pass "
        "gather_weights='all' to the strategy if it is FSDPStrategy or DeepSpeedStrategy."
    )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute shapes; refuse code that reads values, or adds those of other tensors."""
        result = super().__torch_function__(func, types, args, kwargs)
        return tree_map_only(Tensor, _without_values, result)

    @classmethod
    def needs_values(cls, func: Any, given: Any) -> bool:
        """Whether a function reads values, or has tensors that have some."""
        if getattr(func, "__name__", "") in _READS:
            return True

        def has_values() -> bool:
            return any(isinstance(each, Tensor) and not each.is_meta for each in tree_leaves(given))

        return bool(without_subclasses(has_values))


class NotGathered(NotGatheredValue, nn.Parameter):
    """A parameter that only another rank holds after a stage."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NotGathered:
        empty = without_subclasses(torch.empty_like, self)
        copied = nn.Parameter(empty, self.requires_grad)
        # No ordinary way: a call of the class has a result without its type.
        copied.__class__ = NotGathered
        memo[id(self)] = copied
        return copied  # type: ignore[return-value]


def _without_values(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(NotGatheredValue) if type(tensor) is Tensor and tensor.is_meta else tensor


def is_called_by_user() -> bool:
    """Whether the next caller that belongs neither to torch nor to the standard library is not phalanx itself."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.optim."):
            # Steps and zero_grad, which leave out what has no gradient.
            return False
        top = module.partition(".")[0]
        if module != __name__ and top != "torch" and top not in sys.stdlib_module_names:
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
