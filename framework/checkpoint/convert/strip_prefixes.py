"""Removal of the prefixes that wrappers add to tensor names, where a format implies them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from torch import nn

from ...core.errors import CheckpointError

V = TypeVar("V")

# Parts of a name that only a wrapper puts there: torch.compile, FSDP1, activation checkpointing.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def bare(name: str, prefixes: tuple[str, ...] = ()) -> str:
    """Return a name without the parts of wrappers, and without ``prefixes`` at its beginning, in their order."""
    name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
    for prefix in prefixes:
        name = name.removeprefix(prefix)
    return name


def all_bare(tensors: Mapping[str, V], prefixes: tuple[str, ...] = ()) -> dict[str, V]:
    """Return tensors by their bare names; a prefix is taken off where all names have it.

    Raises:
        CheckpointError: two names become one.
    """
    inner = {bare(name): tensor for name, tensor in tensors.items()}
    for prefix in prefixes:
        if inner and all(name.startswith(prefix) for name in inner):
            inner = {name.removeprefix(prefix): tensor for name, tensor in inner.items()}
    if len(inner) != len(tensors):
        raise CheckpointError("two tensors of the foreign checkpoint have one name once wrappers are taken out of it.")
    return inner


def prefix_in(module: nn.Module | None, names: Mapping[str, object], given: str) -> str:
    """Return the prefix of all ``names`` in ``module``: ``given``, nothing, or the name of an attribute and a dot.

    A model that was trained alone is often an attribute of the module it is trained as here, such as ``net``.
    """
    if given or module is None:
        return given
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)} | {
        name for name, _ in module.named_buffers(remove_duplicate=False)
    }
    if all(name in own for name in names):
        return ""
    candidates = [f"{child}." for child, _ in module.named_children()]
    fitting = [prefix for prefix in candidates if all(prefix + name in own for name in names)]
    return fitting[0] if len(fitting) == 1 else ""
