"""Taking canonical state of a sharded model and putting it back, for several tests."""

from __future__ import annotations

from typing import Any

import torch
from small_gpt import loss_of, optimizer_of, small_gpt, token_data
from torch import Tensor, nn

from phalanx.framework.checkpoint.reader import held
from phalanx.framework.checkpoint.write_plan import Shard
from phalanx.framework.core.optimizer_config import parameters_of
from phalanx.framework.core.precision import resolve_precision
from phalanx.strategies import FSDPStrategy

Canonical = tuple[dict[str, Tensor], dict[str, dict[str, Any]]]


def connected(strategy: FSDPStrategy, precision: str = "32-true") -> FSDPStrategy:
    """Return a strategy that has met the other ranks."""
    strategy.connect("cpu", 1, resolve_precision(precision))
    return strategy


def updated(
    strategy: FSDPStrategy, module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2, first: int = 0
) -> list[float]:
    """Train for a few steps, all ranks on the same batches; return the losses."""
    x, y = token_data(24).tensors
    forward = strategy.route(lambda position: loss_of(module(x[position:][:8]), y[position:][:8]), training=True)
    losses = []
    for step in range(first, first + steps):
        strategy.zero_grad(optimizer)
        loss = forward(step * 8 % 24)
        strategy.backward(loss)
        norm = strategy.gradients.norm(parameters_of(optimizer))
        strategy.gradients.clip_by_norm(parameters_of(optimizer), 0.1, norm)
        strategy.step(optimizer)
        losses.append(loss.item())
    return losses


def assembled(strategy: FSDPStrategy, parts: dict[str, Shard]) -> dict[str, Tensor]:
    """Return whole tensors from all ranks' shards; every element must be held, by ranks that agree."""
    wholes: dict[str, Tensor] = {}
    described = {name: (shard.tensor.clone(), shard.shape, shard.offsets) for name, shard in parts.items()}
    for rank_parts in strategy.world.all_gather_object(described):
        for name, (tensor, shape, offsets) in rank_parts.items():
            whole = wholes.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            box = whole[tuple(slice(o, o + s) for o, s in zip(offsets, tensor.shape, strict=True))]
            assert torch.equal(torch.where(box.isnan(), tensor.double(), box), tensor.double())
            box.copy_(tensor)
    assert not any(whole.isnan().any() for whole in wholes.values())
    return {name: whole.float() for name, whole in wholes.items()}


def canonical(strategy: FSDPStrategy, module: nn.Module, optimizer: torch.optim.Optimizer) -> Canonical:
    """Return all state by name, whole."""
    model = assembled(strategy, strategy.state.model_state(module))
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    slots: dict[str, dict[str, Any]] = {}
    for parameter, own in strategy.state.optimizer_state(optimizer):
        shards = {slot: value for slot, value in own.items() if isinstance(value, Shard)}
        numbers = {slot: value.clone() for slot, value in own.items() if not isinstance(value, Shard)}
        slots[names[id(parameter)]] = {**assembled(strategy, shards), **numbers}
    return model, slots


def single_process(steps: int) -> tuple[list[float], Canonical]:
    """Train by hand; return losses and state."""
    gpt, (x, y) = small_gpt(), token_data(24).tensors
    optimizer = optimizer_of(gpt)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(gpt(x[step * 8 % 24 :][:8]), y[step * 8 % 24 :][:8])
        loss.backward()
        nn.utils.clip_grad_norm_(gpt.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}
    slots = {names[id(parameter)]: dict(state) for parameter, state in optimizer.state.items()}
    return losses, ({name: tensor.detach().clone() for name, tensor in gpt.state_dict().items()}, slots)


def saved(strategy: FSDPStrategy) -> tuple[Canonical, dict[str, tuple[int, ...]]]:
    gpt = small_gpt()
    optimizer = optimizer_of(gpt)
    connected(strategy).setup(gpt, [optimizer], training=True)
    updated(strategy, gpt, optimizer)
    shapes = strategy.state.shapes(gpt)
    state = canonical(strategy, gpt, optimizer)
    strategy.restore(gpt)
    return state, shapes


def loaded(strategy: FSDPStrategy, state: Canonical, fresh: bool) -> tuple[Canonical, list[float]]:
    """Load state into another model, and train on; ``fresh`` into an optimizer that has not stepped."""
    gpt = small_gpt(seed=99)
    optimizer = optimizer_of(gpt)
    connected(strategy).setup(gpt, [optimizer], training=True)
    if not fresh:
        updated(strategy, gpt, optimizer, 1)
    model, slots = state
    strategy.state.load_model_state(gpt, held(model))
    names = {id(parameter): name for name, parameter in gpt.named_parameters()}
    own = [slots.get(names[id(parameter)], {}) for parameter in parameters_of(optimizer)]
    stored = [{slot: held({"": v})[""] if v.dim() else v for slot, v in each.items()} for each in own]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    strategy.state.load_optimizer_state(optimizer, stored, groups)
    put_back = canonical(strategy, gpt, optimizer)
    return put_back, updated(strategy, gpt, optimizer, 3, first=2)
