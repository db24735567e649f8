"""Under ZeRO, ``optimizer.state``, groups, hooks and gradients that stay mean what they mean in one process."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from mixture import PLACES
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Fabric, TrainModule
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
        self.ranks: int = 1 if fabric is None else fabric.world_size
        self.rank: int = 0 if fabric is None else fabric.global_rank
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


# Stages 1 and 2 differ in when gradients are reduced, and not in their state.
STATES = ("zero2", "zero3", "zero2-offload", "zero3-offload")
# Those of a program are made one after the other.
EDITS = [
    (zero_moments, read),
    (halve_through_data, replace_tensors),
    (reset, reset_layer),
    (replace_state, count_again),
    (rewind,),
]


def all_of(edits: Sequence[Callable[[Any], None]]) -> Callable[[Any], None]:
    def edit_all(program: Any) -> None:
        for edit in edits:
            edit(program)

    return edit_all


def edited(place: str | None) -> list[Any]:
    # A new Fabric for each edit would create DeepSpeed's process groups again.
    fabric = None if place is None else trainer_of(place)
    return [Program(fabric).run(all_of(edits)) for edits in EDITS]


@pytest.mark.parametrize(
    ("place", "ranks"),
    [("zero1", 2), ("zero2", 3), ("zero3", 3), ("zero3", 1), ("zero2-offload", 2), ("zero3-offload", 2)],
)
def test_the_state_of_the_optimizer_is_read_and_written(place: str, ranks: int) -> None:
    expected = edited(None)
    for found in run_on_ranks(ranks, edited, place):
        for edit, one, other in zip(EDITS, found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=f"{edit}: {one} instead of {other}")


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


@pytest.mark.parametrize("place", STATES)
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


# ---- hooks on the step, and passes of torch's own --------------------------------------------------------------------


def hooked(place: str | None) -> Any:
    program = Program(None if place is None else trainer_of(place))

    def halve(optimizer: Any, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def note(optimizer: Any, *_: Any) -> None:
        program.seen += [float(one.detach().norm()) for one in optimizer.param_groups[0]["params"]]

    program.optimizer.register_step_pre_hook(halve)
    program.optimizer.register_step_post_hook(note)
    return program.run(lambda program: None)


@pytest.mark.parametrize("place", ["zero2", "zero3", "zero2-offload"])
def test_hooks_on_a_step_change_gradients_and_read_weights(place: str) -> None:
    expected = hooked(None)
    for found in run_on_ranks(2, hooked, place):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class InStep(TrainModule):
    """Calls torch's own ``backward`` in its training step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = Turns()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for part in batch[0].split(len(batch[0]) // 2):
            (0.5 * functional.mse_loss(self.net(part, 0), part[:, :3])).backward()
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return adamw(self.net)


def in_step(strategy: str, ranks: int) -> list[Tensor]:
    module = InStep()
    rows = TensorDataset(torch.randn(24, 5, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(rows, batch_size=8 // ranks)
    silent_trainer(strategy=strategy, devices=ranks, max_epochs=1).fit(module, loader)
    return [one.detach().clone() for one in module.parameters()]


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_step_may_call_backward_of_torch(strategy: str) -> None:
    expected = in_step("single", 1)
    torch.testing.assert_close(run_on_ranks(2, in_step, strategy, 2)[0], expected, rtol=1e-4, atol=1e-5)


# ---- refusals --------------------------------------------------------------------------------------------------------


class Normed(torch.optim.Optimizer):
    """Divides each gradient by its norm."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad / parameter.grad.norm(), alpha=-0.1)


def attempt(fabric: Any, what: str) -> None:
    program = Program(fabric, (lambda net: Normed(net.parameters())) if what == "norms" else adamw)
    net = program.net
    if what == "memory":
        net.second.weight.data = net.third.weight.data
    elif what == "left out":
        program.optimizer = adamw(net.first)
    elif what == "unfrozen":
        net.third.requires_grad_(False)
    program.net, program.optimizer = fabric.setup(net, program.optimizer)
    for _ in range(2):
        program.backward(False)
        if what == "left out":
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        elif what == "group":
            program.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        elif what == "unfrozen":
            net.third.requires_grad_(True)
        program.optimizer.step()
        if what == "shape":
            program.optimizer.state[net.first.weight]["exp_avg"] = torch.zeros(2)
        if what != "twice":
            program.optimizer.zero_grad()


def refused(strategy: str, what: str) -> str:
    fabric = Fabric(accelerator="cpu", devices="auto", strategy=strategy)
    with pytest.raises(PhalanxError) as caught:
        attempt(fabric, what)
    fabric.free_memory()
    return str(caught.value)


def kept_after(strategy: str) -> str:
    fabric = Fabric(accelerator="cpu", devices="auto", strategy=strategy)
    program = Program(fabric)
    optimizer = program.optimizer
    program.run(lambda program: None)
    with pytest.raises(PhalanxError) as caught:
        len(optimizer.state)
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "what", "name"),
    [
        ("zero2", "norms", "Normed"),
        ("zero2", "memory", "'second.weight'"),
        ("zero2", "left out", "requires_grad_(False)"),
        ("zero3", "group", "AdamW"),
        ("zero2", "unfrozen", "requires_grad"),
        ("zero3", "unfrozen", "requires_grad"),
        ("zero2", "twice", "zero_grad"),
        ("zero2", "shape", "'exp_avg'"),
    ],
)
def test_what_an_engine_cannot_follow_is_refused(strategy: str, what: str, name: str) -> None:
    assert name in run_on_ranks(2, refused, strategy, what)[0]


def test_the_state_of_an_engine_that_has_ended_is_refused() -> None:
    assert "on_fit_end" in run_on_ranks(2, kept_after, "zero2")[0]
