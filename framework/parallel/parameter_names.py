"""The names of tensors in canonical state: those of the user's own modules, whatever wraps them for a while.

``torch.compile``, torch's activation checkpointing and ``DistributedDataParallel`` hold what they wrap as an attribute
of their own, whose name lands in every parameter's. A checkpoint knows nothing of it, so wrappers come and go freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from torch import Tensor, nn

from ..core.errors import CheckpointError

T = TypeVar("T")

# As torch names it in a state_dict.
_EXTRA_STATE = "_extra_state"
_WRAPPED = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
# Their attribute has a name that users give too.
_PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def canonical_names(module: nn.Module) -> Callable[[str], str]:
    """Return what makes a name in ``module`` canonical: it leaves the attributes of wrappers out."""
    parallel = {_unwrapped(path) for path, part in module.named_modules() if isinstance(part, _PARALLEL)}

    def canonical(name: str) -> str:
        if parallel:
            kept: list[str] = []
            for part in _unwrapped(name).split("."):
                if part != "module" or ".".join(kept) not in parallel:
                    kept.append(part)
            return ".".join(kept)
        return _unwrapped(name)

    if parallel:
        # The paths of wrappers inside wrappers are canonical too by then.
        parallel = {canonical(path) for path in sorted(parallel, key=len)} | parallel
    return canonical


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPED)


def state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a module's state by its own names: parameters and what buffers it saves.

    What modules tell by ``get_extra_state`` is none of them, whatever its type.
    """
    state = module.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != _EXTRA_STATE}


def canonical_table(module: nn.Module) -> dict[str, str]:
    """Return, for the canonical name of each tensor in a module's state, the name that the module has for it."""
    canonical = canonical_names(module)
    return {canonical(name): name for name in state_tensors(module)}


def names_of(module: nn.Module) -> dict[int, str]:
    """Return the canonical name of each parameter, by its identity; a tied one has its first name."""
    canonical = canonical_names(module)
    return {id(parameter): canonical(name) for name, parameter in module.named_parameters()}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return, for each canonical name in a module's state, the first name of the same tensor."""
    canonical, first = canonical_names(module), dict[int, str]()
    tensors = state_tensors(module)
    return {canonical(name): first.setdefault(id(tensor), canonical(name)) for name, tensor in tensors.items()}


def renamed(names: Iterable[str], renames: Mapping[str, str]) -> dict[str, str]:
    """Return, for the new name of each of a checkpoint's tensors, the one it was saved by.

    ``renames`` maps whole first parts of names to what takes their place: ``{"net": "body.net"}``, ``{"model": ""}`` or
    ``{"": "model"}``. Of several that fit, the longest counts.

    Raises:
        CheckpointError: two tensors would have one name.
    """
    prefixes = sorted(
        ((old.rstrip("."), new.rstrip(".")) for old, new in renames.items()), key=lambda one: -len(one[0])
    )
    found: dict[str, str] = {}
    for name in names:
        new = _renamed(name, prefixes)
        if new in found:
            raise CheckpointError(
                f"renaming names of the checkpoint gives {found[new]} and {name} one name, {new}: give other renames."
            )
        found[new] = name
    return found


def begins(name: str, first: str) -> bool:
    """Whether ``first`` is all of a name or its whole first parts; an empty text is of every name."""
    return not first or name == first or name.startswith(f"{first}.")


def _renamed(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    for old, new in prefixes:
        if begins(name, old):
            rest = name[len(old) :].removeprefix(".")
            return ".".join(part for part in (new, rest) if part)
    return name
