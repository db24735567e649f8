"""Under ZeRO, ``optimizer.state``, groups, hooks and gradients that stay mean what they mean with torch's optimizers."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from messages import says
from mixture import PLACES
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional

from phalanx import Fabric
from phalanx.errors import PhalanxError
from phalanx.strategies import DeepSpeedStrategy


class Turns(nn.Module):
    """Layers of odd sizes, of which each call uses two, and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, turn: int) -> Tensor:
        layer = self.third if turn % 2 else self.second
        output: Tensor = self.scale * layer(torch.tanh(self.first(x)))
        return output


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.02, eps=1e-3, weight_decay=0.1)


class Program:
    """A loop in a Fabric, or in plain torch on the global batches without one; ``edit`` is called after each update."""

    def __init__(self, fabric: Any, optimizer: Callable[[Any], torch.optim.Optimizer] = adamw) -> None:
        self.fabric = fabric
        self.ranks, self.rank = (1, 0) if fabric is None else (fabric.world_size, fabric.global_rank)
        self.net: Any = Turns()
        self.optimizer: Any = optimizer(self.net)
        self.before_setup: Callable[[Any], None] = lambda program: None
        self.seen: list[float] = []
        self.step = 0

    def backward(self, skips: bool) -> None:
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(self.step)).chunk(self.ranks)[self.rank]
        loss = functional.mse_loss(self.net(x, self.step if skips else 0), x[:, :3])
        loss.backward() if self.fabric is None else self.fabric.backward(loss)

    def run(self, edit: Callable[[Any], None], steps: int = 4, skips: bool = False) -> Any:
        self.before_setup(self)
        if self.fabric is not None:
            self.net, self.optimizer = self.fabric.setup(self.net, self.optimizer)
        for self.step in range(steps):
            self.optimizer.zero_grad()
            self.backward(skips)
            self.optimizer.step()
            edit(self)
        return self.outcome()

    def outcome(self) -> Any:
        with torch.no_grad():
            outputs = [self.net(torch.eye(5), turn).clone() for turn in range(2)]
        if self.fabric is not None:
            self.fabric.free_memory()
        return outputs, self.seen


def trainer_of(place: str) -> Fabric:
    return Fabric(accelerator="cpu", devices="auto", strategy=DeepSpeedStrategy(**PLACES[place]))


# ---- reading and writing the state ----------------------------------------------------------------------------------


def zero_moments(program: Any) -> None:
    for slots in program.optimizer.state.values():
        slots["exp_avg"].zero_()


def halve_through_data(program: Any) -> None:
    slots = program.optimizer.state[program.net.first.weight]
    slots["exp_avg_sq"].data.mul_(0.5)
    slots["exp_avg"][1:3] = 0.0


def replace_tensors(program: Any) -> None:
    for parameter in program.net.parameters():
        if parameter in program.optimizer.state:
            slots = program.optimizer.state[parameter]
            slots["exp_avg"] = 0.5 * slots["exp_avg"]


def reset(program: Any) -> None:
    if program.step == 1:
        program.optimizer.state.clear()


def replace_state(program: Any) -> None:
    if program.step == 1:
        program.optimizer.state = defaultdict(dict)


def reset_layer(program: Any) -> None:
    if program.step == 2:
        for parameter in program.net.second.parameters():
            del program.optimizer.state[parameter]


def count_again(program: Any) -> None:
    for slots in program.optimizer.state.values():
        slots["step"] = torch.zeros(()) + 1


def rewind(program: Any) -> None:
    if program.step == 0:
        program.kept = copy.deepcopy(program.optimizer.state_dict())
    elif program.step == 2:
        program.optimizer.load_state_dict(program.kept)
        program.optimizer.param_groups[0]["lr"] = 0.05


def read(program: Any) -> None:
    state = program.optimizer.state
    program.seen += [float(state[program.net.first.bias]["exp_avg_sq"].sum()), len(state)]
    program.seen.append(float(sum(slots["exp_avg"].norm() for slots in state.values())))
    program.seen += [float(slots["step"]) for slots in program.optimizer.state_dict()["state"].values()]


EDITS = [
    zero_moments, halve_through_data, replace_tensors, reset, replace_state, reset_layer, count_again, rewind, read,
]  # fmt: skip


def edited(place: str | None) -> list[Any]:
    # A new Fabric each time would start DeepSpeed's groups anew.
    fabric = None if place is None else trainer_of(place)
    return [Program(fabric).run(edit) for edit in EDITS]


PLACES_AND_RANKS = [*((place, 2) for place in PLACES), ("zero2", 3), ("zero3", 3), ("zero1", 1), ("zero3", 1)]


@pytest.mark.parametrize(("place", "ranks"), PLACES_AND_RANKS)
def test_the_state_of_the_optimizer_is_read_and_written(place: str, ranks: int) -> None:
    expected = edited(None)
    for found in run_on_ranks(ranks, edited, place):
        for edit, one, other in zip(EDITS, found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=lambda text, e=edit: f"{e}: {text}")


# ---- state from before the set-up -----------------------------------------------------------------------------------


def train_before(program: Any) -> None:
    for program.step in range(3):
        functional.mse_loss(program.net(torch.ones(4, 5), program.step), torch.zeros(4, 3)).backward()
        program.optimizer.step()
        program.optimizer.zero_grad()


def nadam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(module.parameters(), lr=0.02, eps=1e-3)


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def with_state(place: str | None) -> list[Any]:
    fabric = None if place is None else trainer_of(place)
    found = []
    for optimizer in (adamw, nadam, momentum):
        program = Program(fabric, optimizer)
        program.before_setup = train_before
        found.append(program.run(lambda program: None, skips=True))
    return found


@pytest.mark.parametrize("place", PLACES)
def test_an_optimizer_brings_the_state_that_it_has(place: str) -> None:
    expected = with_state(None)
    for found in run_on_ranks(2, with_state, place):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


# ---- gradients that stay, and that are set by hand -------------------------------------------------------------------


def to_zero(program: Any) -> None:
    program.optimizer.zero_grad(set_to_none=False)


def to_none(program: Any) -> None:
    for parameter in program.net.parameters():
        parameter.grad = None


def of_module(program: Any) -> None:
    program.net.zero_grad()


def reset_by(place: str | None, drop: Callable[[Any], None]) -> Any:
    program = Program(None if place is None else trainer_of(place))
    if program.fabric is not None:
        program.net, program.optimizer = program.fabric.setup(program.net, program.optimizer)
    for program.step in range(4):
        drop(program)
        program.backward(True)
        program.optimizer.step()
    return program.outcome()


def by_hand(place: str | None) -> Any:
    """Set gradients without a backward pass, of each rank's own loss."""
    program = Program(None if place is None else trainer_of(place))
    if program.fabric is not None:
        program.net, program.optimizer = program.fabric.setup(program.net, program.optimizer)
    for program.step in range(3):
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(program.step))
        x = x.chunk(program.ranks)[program.rank]
        parameters = [*program.net.first.parameters(), *program.net.second.parameters()]
        loss = program.net(x, 0).square().mean()
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        if program.step == 1:
            # On top of those.
            program.backward(False)
        program.optimizer.step()
        program.optimizer.zero_grad()
    return program.outcome()


def dropped(place: str | None) -> list[Any]:
    return [*(reset_by(place, drop) for drop in (to_zero, to_none, of_module)), by_hand(place)]


@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_dropped_zeroed_and_set_as_in_torch(place: str) -> None:
    expected = dropped(None)
    for found in run_on_ranks(2, dropped, place):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
