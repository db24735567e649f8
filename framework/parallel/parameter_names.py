"""Canonical names of tensors: their names in the user's modules, without those of wrappers.

``torch.compile``, torch's activation checkpointing and ``DistributedDataParallel`` hold the wrapped module as an
attribute, whose name becomes part of every parameter's name. Checkpoints do not contain it, so wrappers can be added
and removed freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from ..core.errors import CheckpointError
from ..core.torch_internals import without_wrappers

T = TypeVar("T")

# The name that torch uses in a state_dict.
_EXTRA_STATE = "_extra_state"
# These wrappers use an attribute name that users choose as well.
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def buffer_names(module: nn.Module) -> set[str]:
    """Return the canonical names of the buffers of a module; a buffer that is registered twice has two."""
    canonical = canonical_names(module)
    return {canonical(name) for name, _ in module.named_buffers(remove_duplicate=False)}


def canonical_names(module: nn.Module) -> Callable[[str], str]:
    """Return a function that makes a name in ``module`` canonical, by removing the attributes of wrappers."""
    parallel = {without_wrappers(path) for path, part in module.named_modules() if isinstance(part, _PARALLEL)}

    def canonical(name: str) -> str:
        if parallel:
            kept: list[str] = []
            for part in without_wrappers(name).split("."):
                if part != "module" or ".".join(kept) not in parallel:
                    kept.append(part)
            return ".".join(kept)
        return without_wrappers(name)

    if parallel:
        # The paths of wrappers inside wrappers are already canonical here.
        parallel = {canonical(path) for path in sorted(parallel, key=len)} | parallel
    return canonical


def state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's state by the module's names: parameters and persistent buffers.

    Values from ``get_extra_state`` are not included, even if they are tensors.
    """
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != _EXTRA_STATE}


def canonical_table(module: nn.Module) -> dict[str, str]:
    """Map the canonical name of each tensor in a module's state to the module's name for it."""
    canonical = canonical_names(module)
    return {canonical(name): name for name in state_tensors(module)}


def names_of(module: nn.Module) -> dict[int, str]:
    """Map the ``id`` of each parameter to its canonical name; a tied one has its first name."""
    canonical = canonical_names(module)
    return {id(parameter): canonical(name) for name, parameter in module.named_parameters()}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Map each canonical name in a module's state to the first name of the same tensor."""
    canonical, first = canonical_names(module), dict[int, str]()
    tensors = state_tensors(module)
    return {canonical(name): first.setdefault(id(tensor), canonical(name)) for name, tensor in tensors.items()}


def renamed(names: Iterable[str], renames: Mapping[str, str]) -> dict[str, str]:
    """Map the new name of each tensor of a checkpoint to the name under which it was saved.

    ``renames`` maps leading parts of names to their replacements: ``{"net": "body.net"}``, ``{"model": ""}`` or
    ``{"": "model"}``. If several match, the longest applies.

    Raises:
        CheckpointError: two tensors would have the same name.
    """
    prefixes = sorted(
        ((old.rstrip("."), new.rstrip(".")) for old, new in renames.items()), key=lambda one: -len(one[0])
    )
    found: dict[str, str] = {}
    for name in names:
        new = _renamed(name, prefixes)
        if new in found:
            raise CheckpointError(
                f"renaming gives {found[new]} and {name} of the checkpoint the same name, {new}: give other renames."
            )
        found[new] = name
    return found


def begins(name: str, first: str) -> bool:
    """Whether ``first`` is a name or its leading parts; an empty ``first`` matches every name."""
    return not first or name == first or name.startswith(f"{first}.")


def _renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    for old, new in prefixes:
        if begins(name, old):
            rest = name[len(old) :].removeprefix(".")
            return ".".join(part for part in (new, rest) if part)
    return name
