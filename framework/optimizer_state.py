"""An optimizer's part of a checkpoint, by parameter name: taken, compared and put back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .checkpoint.codec import decode, encode_inline
from .checkpoint.plan import Shard
from .checkpoint.read import Checkpoint
from .checkpoint.stored import SavedTensor
from .errors import CheckpointError
from .strategy import Strategy, parameters_of


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Shard]:
    """Return tensors that this rank holds whole, as shards."""
    return {name: Shard.whole(tensor) for name, tensor in tensors.items()}


def names_of(module: nn.Module) -> dict[int, str]:
    """Return the name of each parameter, by its identity; a tied one has its first name."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def optimizer_state(
    strategy: Strategy, optimizer: Optimizer, names: Mapping[int, str], index: int
) -> tuple[dict[str, Any], dict[str, Shard]]:
    """Return hyperparameters and scalars as JSON, and tensors as ``<index>/<slot>/<parameter>``. Collective."""
    shards: dict[str, Shard] = {}
    scalars: dict[str, Any] = {}
    positions = {id(parameter): position for position, parameter in enumerate(parameters_of(optimizer))}
    for parameter, slots in strategy.optimizer_state(optimizer):
        name = names.get(id(parameter), f"unnamed.{positions[id(parameter)]}")
        for slot, value in slots.items():
            if isinstance(value, Shard):
                shards[f"{index}/{slot}/{name}"] = value
            else:
                scalars.setdefault(name, {})[slot] = value.cpu() if isinstance(value, Tensor) else value
    groups = []
    for group in optimizer.param_groups:
        hyper = {key: value for key, value in group.items() if key != "params"}
        params = [names.get(id(p), f"unnamed.{i}") for i, p in enumerate(group["params"])]
        groups.append({"params": params, "hyper": encode_inline(hyper)})
    return {"class": type(optimizer).__name__, "groups": groups, "scalars": encode_inline(scalars)}, shards


def check_optimizers(optimizers: list[Optimizer], saved: list[dict[str, Any]], names: Mapping[int, str]) -> None:
    """Compare optimizers with those of a checkpoint.

    Raises:
        CheckpointError: their number, classes or parameter groups differ.
    """
    if len(saved) != len(optimizers):
        raise CheckpointError(
            f"the checkpoint holds {len(saved)} optimizers, configure_optimizers returned {len(optimizers)}."
        )
    for index, (optimizer, state) in enumerate(zip(optimizers, saved, strict=True)):
        mine, theirs = type(optimizer).__name__, state["class"]
        if mine != theirs:
            raise CheckpointError(f"optimizer {index} is {mine}, but the checkpoint holds the state of {theirs}.")
        own = [[names.get(id(p), f"unnamed.{i}") for i, p in enumerate(g["params"])] for g in optimizer.param_groups]
        kept = [group["params"] for group in state["groups"]]
        if [sorted(group) for group in own] != [sorted(group) for group in kept]:
            different = sorted({n for g in own for n in g} ^ {n for g in kept for n in g})
            raise CheckpointError(
                f"optimizer {index} has other parameter groups than the checkpoint: {len(own)} against {len(kept)}"
                + (f", and these parameters are in one only: {', '.join(different[:20])}." if different else ".")
            )


def load_optimizer(
    strategy: Strategy,
    optimizer: Optimizer,
    saved: dict[str, Any],
    names: Mapping[int, str],
    checkpoint: Checkpoint,
    index: int,
) -> None:
    """Put an optimizer's state back through its strategy. Collective."""
    numbers = {names.get(id(p), f"unnamed.{i}"): i for i, p in enumerate(parameters_of(optimizer))}
    state: list[dict[str, Any]] = [{} for _ in numbers]
    for name, slots in decode(saved["scalars"]).items():
        state[numbers[name]].update(slots)
    for key in checkpoint.names("optimizer"):
        owner, slot, name = key.split("/", 2)
        if int(owner) == index:
            state[numbers[name]][slot] = SavedTensor(checkpoint, "optimizer", key)
    groups = []
    for group, kept in zip(optimizer.param_groups, saved["groups"], strict=True):
        own = {key: value for key, value in group.items() if key != "params"}
        groups.append({**own, **decode(kept["hyper"])})
    strategy.load_optimizer_state(optimizer, state, groups)
