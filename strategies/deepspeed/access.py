"""``parameter.grad`` and ``parameter.data`` of parameters that an engine trains, as they are without an engine.

DeepSpeed's engine takes the gradients out of the parameters, and updates copies of the weights. A user's hook or step
that reads ``parameter.grad`` gets the full gradient, gathered when it is read; the engine gets it back, changed or not,
before it uses the gradients. Weights written through ``parameter.data`` are counted as changes of the parameter.

Both are attributes of torch's class in C++, so properties of ``nn.Parameter`` take their place while an engine is there
and does not run. They do nothing for other parameters.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...framework.core.errors import ConfigurationError
from .flat_groups import full_shape

_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data


class LentGradients:
    """The gradients that a user has read or set since the last backward pass.

    Args:
        full: gathers the gradient of a parameter; None if it has none. Collective.
        exist: whether the engine holds gradients.
        drop: called for a parameter whose gradient is dropped after an update, with whether it becomes one of zeros.
    """

    def __init__(
        self,
        full: Callable[[nn.Parameter], Tensor | None] = lambda _: None,
        exist: Callable[[], bool] = lambda: False,
        drop: Callable[[nn.Parameter, bool], None] = lambda *_: None,
    ) -> None:
        self._full, self.exist, self._drop = full, exist, drop
        self._lent: dict[int, tuple[nn.Parameter, Tensor | None]] = {}
        self.left_out: set[int] = set()
        """Parameters, by ``id``, that would have gradients without the engine, which computes those of its own only."""

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._lent

    def __len__(self) -> int:
        return len(self._lent)

    def get(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the gradient of a parameter, the same object until the engine uses it. Collective the first time."""
        if id(parameter) not in self._lent:
            gradient = self._full(parameter)
            if gradient is None:
                return None
            self._lent[id(parameter)] = parameter, gradient
        return self._lent[id(parameter)][1]

    def set(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Replace the gradient of a parameter; with None the next update leaves the parameter out."""
        if gradient is not None and gradient.shape != full_shape(parameter):
            raise RuntimeError(
                f"assigned grad has data of a different size: {tuple(gradient.shape)} for a parameter of "
                f"{full_shape(parameter)}"
            )
        if gradient is None and not self.exist():
            self.drop(parameter, False)
        else:
            self._lent[id(parameter)] = parameter, gradient

    def drop(self, parameter: nn.Parameter, to_zero: bool) -> None:
        """Drop a gradient that an update has used, or replace it by one of zeros."""
        self._lent.pop(id(parameter), None)
        self._drop(parameter, to_zero)

    def take(self) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Return the gradients, which the engine takes over."""
        lent = list(self._lent.values())
        self._lent.clear()
        return lent

    def forget(self) -> None:
        """Drop the gradients."""
        self._lent.clear()


_OWNERS: dict[int, LentGradients] = {}
# The packages that look at parameters for their own sake, while user code runs, and the hint of a rank without memory,
# which no other rank answers.
_HINTS = f"{__name__.partition('.strategies.')[0]}.framework.trainer.hints"
_TRACERS = ("torch._dynamo.", "torch._subclasses.", "torch._functorch.", "torch._inductor.", "torch.fx.")
_OTHERS = (_HINTS, "deepspeed.", *_TRACERS)
_INSIDE = 0


def watch(parameters: list[nn.Parameter], gradients: LentGradients) -> None:
    """Let ``parameter.grad`` and ``parameter.data`` of these parameters be those of the engine until ``unwatch``."""
    if not _OWNERS and not _INSIDE:
        _install()
    _OWNERS.update({id(one): gradients for one in parameters})


def are_watched(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any of these parameters is that of an engine."""
    return any(id(one) in _OWNERS for one in parameters)


def unwatch(parameters: list[nn.Parameter]) -> None:
    """Undo ``watch``."""
    watched = bool(_OWNERS)
    for one in parameters:
        _OWNERS.pop(id(one), None)
    if watched and not _OWNERS and not _INSIDE:
        _remove()


class EngineRuns:
    """The context of DeepSpeed's own code, to which parameters and their attributes are torch's own."""

    def __init__(self) -> None:
        self._guards: list[Any] = []

    def __enter__(self) -> None:
        global _INSIDE
        if not _INSIDE and _OWNERS:
            _remove()
        _INSIDE += 1
        self._guards.append(torch._C.DisableTorchFunctionSubclass())
        self._guards[-1].__enter__()

    def __exit__(self, *error: object) -> None:
        global _INSIDE
        self._guards.pop().__exit__(*error)
        _INSIDE -= 1
        if not _INSIDE and _OWNERS:
            _install()


engine_runs = EngineRuns()


def _install() -> None:
    for name, value in _PROPERTIES.items():
        setattr(nn.Parameter, name, value)


def _remove() -> None:
    for name in _PROPERTIES:
        delattr(nn.Parameter, name)


def _is_plain(parameter: nn.Parameter) -> bool:
    """Whether an attribute is torch's own: of other parameters, and for DeepSpeed and torch's compiler."""
    # As the modules' dicts of parameters do, which gather one that is looked up.
    caller = sys._getframe(2).f_globals.get("__name__", "")
    return id(parameter) not in _OWNERS or caller.startswith(_OTHERS)


def _get_grad(parameter: nn.Parameter) -> Any:
    if _is_plain(parameter):
        return _GRAD.__get__(parameter)
    gradients = _OWNERS[id(parameter)]
    caller = sys._getframe(1)
    # Functions that drop gradients look first whether there are any.
    drops, is_left_out = caller.f_code.co_name == "zero_grad", id(parameter) in gradients.left_out
    if drops and (is_left_out or not gradients.exist()):
        gradients.drop(parameter, caller.f_locals.get("set_to_none") is False)
        return None
    if is_left_out:
        raise ConfigurationError(
            "parameter.grad of a parameter that is in no group of the optimizer was read, and DeepSpeed's engine "
            "computes the gradients of the optimizer's parameters alone: freeze it with requires_grad_(False) before "
            "the set-up, put it into a group with a learning rate of 0, or use strategy='ddp'."
        )
    return gradients.get(parameter)


def _set_grad(parameter: nn.Parameter, value: Tensor | None) -> None:
    if _is_plain(parameter):
        _GRAD.__set__(parameter, value)
    else:
        _OWNERS[id(parameter)].set(parameter, value)


def _drop_grad(parameter: nn.Parameter) -> None:
    _set_grad(parameter, None)


def _get_data(parameter: nn.Parameter) -> Any:
    if _is_plain(parameter):
        with torch._C.DisableTorchFunctionSubclass():
            return _DATA.__get__(parameter)
    # Unlike torch's, this tensor counts changes together with the parameter.
    return parameter.detach()


def _set_data(parameter: nn.Parameter, value: Tensor) -> None:
    if _is_plain(parameter):
        with torch._C.DisableTorchFunctionSubclass():
            _DATA.__set__(parameter, value)
        return
    shape = full_shape(parameter)
    if value.shape != shape or value.dtype != parameter.dtype:
        raise ConfigurationError(
            f"parameter.data was set to a tensor of {tuple(value.shape)} in {value.dtype}, and DeepSpeed's engine keeps"
            f" the shape and dtype of its start, {shape} in {parameter.dtype}: set it before the set-up."
        )
    with torch.no_grad():
        parameter.copy_(value)


_PROPERTIES: dict[str, Any] = {
    "grad": property(_get_grad, _set_grad, _drop_grad),
    "data": property(_get_data, _set_data),
}
