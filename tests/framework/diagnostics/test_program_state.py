"""The state that a program keeps: what it is compared with, sent and put back."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.framework.diagnostics.isolated_step import isolated
from phalanx.framework.diagnostics.program_state import Large, ProgramState, packed


class Meter:
    def __init__(self) -> None:
        self.total = 0.0


class Keeps(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2))
        self.count, self.outputs, self.last = 0, {"train": [torch.zeros(1)], "n": Counter()}, deque([1], maxlen=2)
        self.meter, self.kinds, self.random = Meter(), {1}, torch.Generator().manual_seed(3)
        self.python = random.Random(5)
        self.mean = torch.zeros(2)


def step(module: Any) -> None:
    module.count += 1
    module.outputs["train"].append(torch.ones(2))
    module.outputs["n"]["x"] += 2
    module.last.append(7)
    module.meter.total += 0.5
    module.kinds.add(4)
    torch.rand(3, generator=module.random)
    module.python.random()
    module.seen += 1
    module.mean = module.mean + 2
    module.added = "text"


def described(module: Any) -> list[Any]:
    numbers = [[each.tolist() for each in module.outputs["train"]], dict(module.outputs["n"]), list(module.last)]
    drawn = torch.rand(1, generator=module.random).item(), module.python.random()
    kept = module.count, module.meter.total, module.kinds, getattr(module, "added", None), module.mean.tolist()
    return [*numbers, *drawn, *kept]


def test_changes_of_one_process_make_the_state_of_another_equal() -> None:
    here, there = Keeps(), Keeps()
    taken = ProgramState.of(here).take()
    step(here)

    ProgramState.of(there).apply(packed(ProgramState.of(here).changes(taken)))

    assert there.seen.tolist() == here.seen.tolist() == [1, 1]
    assert described(there) == described(here)


def test_a_state_without_changes_has_none_and_weights_are_no_part_of_it() -> None:
    module = Keeps()
    state = ProgramState.of(module)
    taken = state.take()
    nn.init.ones_(module.layer.weight)
    assert state.changes(taken) == []


def test_a_state_is_put_back_in_the_same_containers() -> None:
    module = Keeps()
    state, outputs, plain = ProgramState.of(module), module.outputs["train"], Keeps()
    taken = state.take()
    step(module)
    state.put_back(taken)
    assert module.outputs["train"] is outputs
    assert described(module) == described(plain)


@pytest.mark.parametrize("keeps", [True, False])
def test_an_isolated_step_may_replace_buffers_where_these_are_not_kept(keeps: bool) -> None:
    module = Keeps()
    with isolated(module, keep_buffers=keeps):
        module.count += 1
        module.seen = torch.ones(2)
    assert module.count == 0
    assert module.seen.tolist() == ([0.0, 0.0] if keeps else [1.0, 1.0])


def test_parts_that_are_left_out_and_long_lists() -> None:
    module: Any = nn.Sequential(Keeps(), Keeps())
    state = ProgramState.of(module, without=[module[1]])
    module[0].outputs["train"] = list(range(20_000))
    taken = state.take()
    step(module[1])
    assert state.changes(taken) == []
    module[0].outputs["train"].append(3)
    (change,) = state.changes(taken)
    assert (change.kind, change.key, change.value, change.name) == ("tail", 20_000, [3], "outputs")


@pytest.mark.parametrize("value", [nn.Linear(1, 1), lambda: 0, open])
def test_values_that_cannot_be_sent_are_left_out(value: Any) -> None:
    module = Keeps()
    state = ProgramState.of(module)
    taken = state.take()
    module.mean = torch.zeros(2000, 2000)
    object.__setattr__(module, "other", value)
    (change,) = packed(state.changes(taken))
    assert change.value == Large((2000, 2000), torch.float32)
