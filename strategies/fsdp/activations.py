"""Activation checkpointing without a wrapper: ``forward`` is overridden per instance, so that names do not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from ...framework.core.errors import ConfigurationError
from ...framework.parallel.activation_memory import recomputed
from ...framework.parallel.blocks import replace_method

# torch runs no compiled code within a compiled backward pass, so other tensors would be recomputed than were saved.
NO_RECOMPUTATION = (
    "recomputes activations with activation_checkpointing, which compiled code does not allow: leave one of them out, "
    "or call torch.utils.checkpoint inside the blocks"
)
Checkpointed: TypeAlias = "bool | type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]"


def check_checkpointing(given: Any) -> None:
    """Check the argument for activation checkpointing, as far as possible without a model.

    Raises:
        ConfigurationError: the argument is not a bool, a class, a tuple of classes or a function.
    """
    classes = given if isinstance(given, tuple) else (given,)
    modules = bool(classes) and all(isinstance(each, type) and issubclass(each, nn.Module) for each in classes)
    if not (isinstance(given, bool) or modules or (callable(given) and not isinstance(given, type))):
        raise ConfigurationError(
            f"activation_checkpointing={given!r}: give True for every unit, a class of modules, a tuple of classes, or "
            "a function from a module to a bool."
        )


def checkpointed_parts(module: nn.Module, units: list[nn.Module], given: Checkpointed) -> list[nn.Module]:
    """Return the submodules whose activations are recomputed in backward.

    Raises:
        ConfigurationError: checkpointing was requested and no submodule matches.
    """
    if given is False:
        return []
    if given is True:
        found = units
    elif isinstance(given, type | tuple):
        found = [part for part in module.modules() if part is not module and isinstance(part, given)]
    else:
        found = [part for part in module.modules() if part is not module and given(part)]
    if not found:
        what = "every unit" if given is True else getattr(given, "__name__", given)
        raise ConfigurationError(
            f"activation_checkpointing asks for {what}, but {type(module).__name__} has no such submodule. It is made "
            f"of these classes: {', '.join(sorted({type(each).__name__ for each in module.children()})) or 'none'}."
        )
    return found


def checkpoint_forward(part: nn.Module) -> Callable[[], None]:
    """Make a module save only its inputs for backward; return a function that reverts this."""
    return replace_method(part, "forward", recomputed(part.forward))
