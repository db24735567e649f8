"""The parts of a model that are handled one by one: repeated blocks, parts that a step calls, and their methods."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost blocks that occur several times in a list or sequence of modules."""
    classes: list[type[nn.Module]] = []
    if isinstance(module, nn.ModuleList | nn.Sequential):
        classes = [type(child) for child in module if _is_block(child)]
    for child in module.children():
        if classes.count(type(child)) > 1 and _is_block(child):
            yield child
        else:
            yield from repeated_blocks(child)


def _is_block(part: nn.Module) -> bool:
    # A module with a step of its own is a whole model: the step calls its parts and not its ``forward``.
    return has_forward(part) and has_parameters(part) and not hasattr(type(part), "training_step")


def callable_children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module's children; for a child that cannot be called, such as a list, the child's children."""
    for child in module.children():
        if has_forward(child):
            yield child
        else:
            yield from callable_children(child)


def has_forward(part: nn.Module) -> bool:
    """Whether a module can be called."""
    return type(part).forward is not nn.Module.forward


def has_parameters(part: nn.Module) -> bool:
    """Whether a module or one of its submodules has parameters."""
    return next(part.parameters(), None) is not None


class ReplacedForward:
    """Another ``forward`` of one module. A copy or a pickle of the module has its own, plain one."""

    def __init__(self, part: nn.Module, function: Callable[..., Any]) -> None:
        self.plain = part.forward
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function."""
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of a bound method is bound to the copy of its object, which is in `memo` by now.
        return copy.deepcopy(self.plain, memo)

    def __reduce__(self) -> Any:
        # The greatest of one item is the item; a function of phalanx would be needed to read the pickle.
        return max, ((self.plain,),)


def replace_method(part: nn.Module, name: str, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace a method of one module, and not of its class; return a function that reverts this."""
    before = vars(part).get(name)
    object.__setattr__(part, name, function)

    def undo() -> None:
        if before is not None:
            object.__setattr__(part, name, before)
        elif name in vars(part):
            object.__delattr__(part, name)

    return undo
