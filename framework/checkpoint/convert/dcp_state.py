"""State in torch.distributed.checkpoint folders: nested again, with optimizers whose state is stored by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...core.errors import CheckpointError
from .foreign_state import ForeignOptimizer, Group, SlotState, bare
from .unpickle_client import Content


def nested(content: Content, source: object) -> dict[str, Any]:
    """Return the state that was saved, nested as it was.

    Raises:
        CheckpointError: the folder's index does not say how it was nested.
    """
    paths = content["paths"]
    tree: dict[Any, Any] = {}
    for name, value in {**content["values"], **content["tensors"]}.items():
        if not paths.get(name):
            raise CheckpointError(f"{source} does not say where {name!r} belongs; it was saved without its planner.")
        place = tree
        for key in paths[name][:-1]:
            place = place.setdefault(key, {})
            if not isinstance(place, dict):
                raise CheckpointError(f"{source} holds {name!r} inside of a value; it is damaged.")
        place[paths[name][-1]] = value
    return tree


def tensors_of(tree: Any, source: object) -> dict[str, Tensor]:
    """Return a model's tensors by name.

    Raises:
        CheckpointError: there are none.
    """
    found = {name: value for name, value in tree.items() if isinstance(value, Tensor)} if isinstance(tree, dict) else {}
    if not found:
        raise CheckpointError(f"{source} holds no tensors of a model where they belong.")
    return found


def named_optimizer(tree: Mapping[Any, Any], source: object, prefix: str = "") -> ForeignOptimizer:
    """Return an optimizer whose state is kept by names.

    Raises:
        CheckpointError: it is kept by position, or not as torch writes it.
    """
    groups_of = tree.get("param_groups", {})
    # A list in which there are dicts was taken apart by position.
    groups = [groups_of[place] for place in sorted(groups_of)] if isinstance(groups_of, dict) else list(groups_of)
    named = []
    for group in groups:
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"{source} holds an optimizer whose groups do not name their parameters.")
        hyper = {key: _unnested(value) for key, value in group.items() if key not in ("params", "param_names")}
        named.append(Group([prefix + bare(name) for name in names], hyper))
    state: SlotState = {prefix + bare(name): dict(slots) for name, slots in tree.get("state", {}).items()}
    return ForeignOptimizer(named, state)


def _unnested(value: Any) -> Any:
    """Rebuild a list of tensors that was saved as a dict by position."""
    if isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
        return [value[key] for key in sorted(value)]
    return value
