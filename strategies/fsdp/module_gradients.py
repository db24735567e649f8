"""Sharded parameters and their gradients, as methods of a module and its submodules find them.

A forward pass without a backward pass leaves parameters gathered. Gathered parameters hold no gradients, except those
that were accumulated without reduction: clipping them, or resetting their gradients, would have no effect. Their memory
is freed later, so ``state_dict()`` returns the sharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...framework.core.torch_versions import drop_unsharded_gradient
from .torch_fsdp import groups_of

_OVERRIDDEN = ("named_parameters", "zero_grad", "state_dict")


class ModuleGradients:
    """The gradients of the sharded parameters of a model.

    Args:
        module: the user's module.
        parts: the sharded modules.
        keeps_gathered: returns whether gathered parameters are needed now.
        reshard: frees gathered parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        parts: Iterable[FSDPModule],
        keeps_gathered: Callable[[], bool],
        reshard: Callable[[], None],
    ) -> None:
        self._groups = [group for part in parts for group in groups_of(part)]
        self._keeps_gathered = keeps_gathered
        self._reshard = reshard
        self._parts = [part for part in module.modules() if not any(name in vars(part) for name in _OVERRIDDEN)]
        self._override()

    def parameters(self) -> Iterator[Any]:
        """Yield torch's records of the sharded parameters."""
        for group in self._groups:
            yield from group.fsdp_params

    def drop_unreduced(self, parameters: Iterable[Tensor]) -> None:
        """Drop gradients that were accumulated without reduction."""
        for each in self._among(parameters):
            drop_unsharded_gradient(each)

    def drop(self, parameters: Iterable[Tensor], set_to_none: bool) -> None:
        """Drop or zero the gradients of parameters, given as they are gathered or sharded now."""
        for each in self._among(parameters):
            drop_unsharded_gradient(each)
            if set_to_none:
                each.sharded_param.grad = None
            elif each.sharded_param.grad is not None:
                each.sharded_param.grad.detach().zero_()

    def show(self) -> None:
        """Free gathered parameters if the sharded ones hold gradients."""
        if self._keeps_gathered() or not any(group.is_unsharded for group in self._groups):
            return
        if any(each.sharded_param.grad is not None for each in self.parameters()):
            self._reshard()

    def _among(self, parameters: Iterable[Tensor]) -> Iterator[Any]:
        wanted = {id(parameter) for parameter in parameters}
        return (each for each in self.parameters() if {id(each.sharded_param), id(each.unsharded_param)} & wanted)

    def _override(self) -> None:
        """Override methods of the module and its submodules that read or reset gradients."""

        def named_parameters(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self.show()
            return type(part).named_parameters(part, *args, **kwargs)

        def zero_grad(part: nn.Module, set_to_none: bool = True) -> None:
            # Not `part.parameters()`, which may free parameters that the coming backward pass needs.
            held = [each for one in part.modules() for each in one._parameters.values() if each is not None]
            self.drop(held, set_to_none)
            type(part).zero_grad(part, set_to_none)

        def state_dict(part: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._keeps_gathered():
                # The memory of gathered tensors is freed later.
                self._reshard()
            return type(part).state_dict(part, *args, **kwargs)

        for part in self._parts:
            for function in (named_parameters, zero_grad, state_dict):
                # A copy of the module binds a bound method to the copy, and a pickle finds it by its name.
                object.__setattr__(part, function.__name__, MethodType(function, part))

    def release(self) -> None:
        """Restore the module's own methods; those of copies do nothing more than torch's."""
        self._groups, self._keeps_gathered = [], lambda: True
        for part in self._parts:
            for name in _OVERRIDDEN:
                object.__delattr__(part, name)
        self._parts = []
