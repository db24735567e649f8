"""An optimizer's part of a checkpoint, by parameter name: saving, and loading as far as it matches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint.codec import decode, encode_inline
from ..checkpoint.reader import Checkpoint, SavedTensor
from ..checkpoint.write_plan import Shard
from ..core.optimizer_config import parameters_of
from ..core.split_optimizer import kind_of
from ..parallel.strategy import Strategy
from .state_matching import OptimizerMatch, group_names

# Options for how an update is computed, which do not affect its result: they depend on the run's device and strategy.
_OF_THE_RUN = ("foreach", "fused", "capturable", "differentiable")


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Wrap full tensors of this rank as shards."""
    return {name: Shard.whole(tensor) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Group:
    """A parameter group at one moment."""

    parameters: list[Tensor]
    frozen: list[bool]
    hyper: dict[str, Any]


def groups_of(optimizer: Optimizer) -> list[Group]:
    """Return copies of an optimizer's parameter groups; the parameters are not copied."""
    return [
        Group(
            [*group["params"]],
            [not parameter.requires_grad for parameter in group["params"]],
            {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            },
        )
        for group in optimizer.param_groups
    ]


def optimizer_state(
    strategy: Strategy,
    optimizer: Optimizer,
    names: Mapping[int, str],
    index: int,
    groups: Sequence[Group] | None = None,
) -> tuple[dict[str, Any], dict[str, Shard]]:
    """Return hyperparameters and scalars as JSON, and tensors as ``<index>/<slot>/<parameter>``. Collective.

    Args:
        strategy: the strategy of the run.
        optimizer: the optimizer.
        names: the name of each parameter by its ``id``.
        index: the position of the optimizer in the run.
        groups: its groups at an earlier moment; None for the present ones.
    """
    shards: dict[str, Shard] = {}
    scalars: dict[str, Any] = {}
    named = group_names(optimizer, names)
    own = dict(zip(map(id, parameters_of(optimizer)), (name for group in named for name in group), strict=True))
    for parameter, slots in strategy.state.optimizer_state(optimizer):
        name = own[id(parameter)]
        for slot, value in slots.items():
            if isinstance(value, Shard):
                shards[f"{index}/{slot}/{name}"] = value
            else:
                scalars.setdefault(name, {})[slot] = value
    _move_to_host(scalars)
    described = []
    for group in groups_of(optimizer) if groups is None else groups:
        params = [own[id(parameter)] for parameter in group.parameters]
        frozen = [name for name, is_frozen in zip(params, group.frozen, strict=True) if is_frozen]
        described.append({"params": params, "frozen": frozen, "hyper": encode_inline(group.hyper)})
    document = {"class": kind_of(optimizer), "groups": described, "scalars": encode_inline(scalars)}
    if order := [own[id(parameter)] for parameter in strategy.state.reduction_order() if id(parameter) in own]:
        document["reduction_order"] = order
    return document, shards


def _move_to_host(scalars: dict[str, dict[str, Any]]) -> None:
    """Replace tensors by copies on the CPU, with one copy for all of the same kind, such as step counters on a GPU."""
    places: dict[Any, list[tuple[dict[str, Any], str]]] = {}
    for slots in scalars.values():
        for slot, value in slots.items():
            if isinstance(value, Tensor) and value.device.type != "cpu":
                places.setdefault((value.device, value.dtype, value.shape), []).append((slots, slot))
    for group in places.values():
        # A stored scalar must not keep the memory of all others.
        copied = torch.stack([slots[slot].detach() for slots, slot in group]).cpu().unbind()
        for (slots, slot), value in zip(group, copied, strict=True):
            slots[slot] = value.clone()


def load_optimizer(
    strategy: Strategy,
    optimizer: Optimizer,
    saved: Mapping[str, Any],
    match: OptimizerMatch,
    checkpoint: Checkpoint,
    index: int,
) -> None:
    """Load an optimizer's state through its strategy, as far as it matches. Collective."""
    positions = {name: position for position, name in match.parameters.items()}
    state: list[dict[str, Any]] = [{} for _ in parameters_of(optimizer)]
    for name, slots in decode(saved["scalars"]).items():
        if name in positions:
            state[positions[name]].update(slots)
    for key in checkpoint.names("optimizer"):
        owner, slot, name = key.split("/", 2)
        if int(owner) == index and name in positions:
            state[positions[name]][slot] = SavedTensor(checkpoint, "optimizer", key)
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    if match.carries_groups:
        for group, kept in zip(groups, saved["groups"], strict=True):
            group.update({key: value for key, value in decode(kept["hyper"]).items() if key not in _OF_THE_RUN})
    strategy.state.load_optimizer_state(optimizer, state, groups)
    parameters, order = parameters_of(optimizer), saved.get("reduction_order", ())
    strategy.state.use_reduction_order([parameters[positions[name]] for name in order if name in positions])
