"""Under ZeRO, what hooks and steps do to weights and gradients means what it means in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from messages import says
from mixture import PLACES
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Fabric, TrainModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.strategies import DeepSpeedStrategy

ROWS = 12
Action = Callable[[Any], None]
Actions = dict[str, list[Action]]


class Acting(TrainModule):
    """Two layers, of which the first has an odd size; calls the actions of each of its hooks."""

    def __init__(self, actions: Actions) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 1)
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)
        self.actions = actions

    def act(self, moment: str) -> None:
        for action in self.actions.get(moment, ()):
            action(self)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.act("step")
        x, y = batch
        with torch.no_grad():
            target = self.teacher(x).mean(1)
        loss: Tensor = (self.second(torch.tanh(self.first(x))).squeeze(1) - y - target).square().mean()
        return loss

    def on_fit_start(self) -> None:
        self.act("on_fit_start")

    def on_after_backward(self) -> None:
        self.act("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.act("on_before_optimizer_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.act("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.act("on_train_epoch_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)


def data(ranks: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(ROWS, 5, generator=generator), torch.randn(ROWS, generator=generator))
    return DataLoader(rows, batch_size=6 // ranks)


def trained(strategy: Any, ranks: int, actions: Actions, **options: Any) -> dict[str, Tensor]:
    """Return the weights after two epochs of two batches."""
    module = Acting(actions)
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_epochs=2, **options)
    trainer.fit(module, data(ranks))
    return {name: one.detach().clone() for name, one in module.named_parameters() if not one.is_meta}


# ---- writing weights ------------------------------------------------------------------------------------------------


@torch.no_grad()
def clamp(module: Any) -> None:
    for parameter in module.first.parameters():
        parameter.clamp_(-0.2, 0.2)


def clamp_data(module: Any) -> None:
    for parameter in module.parameters():
        parameter.data.clamp_(-0.2, 0.2)


def assign_data(module: Any) -> None:
    for mine, new in zip(module.teacher.parameters(), module.first.parameters(), strict=True):
        mine.data = 0.5 * mine.data + 0.5 * new.data
    module.second.weight.data = module.second.weight.data * 0.9


@torch.no_grad()
def momentum(module: Any) -> None:
    for mine, new in zip(module.teacher.parameters(), module.first.parameters(), strict=True):
        mine.mul_(0.5).add_(new, alpha=0.5)


@torch.no_grad()
def one_row(module: Any) -> None:
    module.first.weight[1].zero_()
    module.second.weight[:, 2] = 0.25


def load(module: Any) -> None:
    state = {name: torch.full(one.shape, 0.1) for name, one in module.second.named_parameters()}
    module.second.load_state_dict(state)


@torch.no_grad()
def normalize(module: Any) -> None:
    weight = module.first.weight
    weight.div_(weight.norm(dim=1, keepdim=True))
    nn.init.constant_(module.second.bias, float(weight.numel()) / 100)


WRITES: list[Actions] = [
    {"on_fit_start": [load], "step": [momentum], "on_train_batch_end": [clamp]},
    {"on_before_optimizer_step": [momentum], "on_train_batch_end": [clamp_data], "on_train_epoch_end": [one_row]},
    {"step": [assign_data], "on_after_backward": [normalize], "on_train_batch_end": [assign_data]},
]


# ---- gradients ------------------------------------------------------------------------------------------------------


def freeze_layer(module: Any) -> None:
    for parameter in module.first.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.0)


def noise(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = parameter.grad + 0.01 * torch.arange(float(parameter.numel())).view(parameter.shape)


def clip_norm(module: Any) -> None:
    norm = nn.utils.clip_grad_norm_(module.parameters(), 0.05)
    assert float(norm) > 0.05


def clip_value(module: Any) -> None:
    nn.utils.clip_grad_value_(module.parameters(), 0.01)
    assert all(float(one.grad.abs().max()) <= 0.01 for one in module.parameters() if one.requires_grad)


def drop(module: Any) -> None:
    module.second.bias.grad = None


# With the number of micro-batches of an update.
CHANGES: list[tuple[Actions, int]] = [
    ({"on_after_backward": [noise], "on_before_optimizer_step": [drop]}, 1),
    ({"on_before_optimizer_step": [clip_norm, clip_value]}, 2),
    ({"on_after_backward": [clip_value], "on_before_optimizer_step": [freeze_layer]}, 2),
]


def changed(strategy: Any, ranks: int) -> list[dict[str, Tensor]]:
    return [
        *(trained(strategy, ranks, actions) for actions in WRITES),
        *(trained(strategy, ranks, actions, accumulate_grad_batches=count) for actions, count in CHANGES),
    ]


ROUND_ROBIN: dict[str, dict[str, Any]] = {
    "round robin": {"stage": 2, "round_robin_gradients": True},
    "round robin, offload": {"stage": 1, "round_robin_gradients": True, "offload_optimizer": "cpu"},
}


def changed_under(place: str, ranks: int) -> list[dict[str, Tensor]]:
    return changed(DeepSpeedStrategy(**{**PLACES, **ROUND_ROBIN}[place]), ranks)


@pytest.mark.parametrize(
    ("place", "ranks"), [*((place, 2) for place in (*PLACES, *ROUND_ROBIN)), ("zero3", 1), ("zero2", 3), ("zero3", 3)]
)
def test_weights_and_gradients_that_user_code_changes(place: str, ranks: int) -> None:
    found = run_on_ranks(ranks, changed_under, place, ranks)[0]
    for actions, one, other in zip([*WRITES, *CHANGES], found, changed("single", 1), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=f"{actions}: other weights")


def in_bf16(strategy: str, ranks: int) -> list[dict[str, Tensor]]:
    cases: list[Actions] = [
        {"on_after_backward": [noise], "on_before_optimizer_step": [clip_norm, drop]},
        {"step": [momentum], "on_train_batch_end": [clamp_data]},
    ]
    return [trained(strategy, ranks, actions, precision="bf16-mixed") for actions in cases]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_changes_apply_to_the_masters_of_a_lower_dtype(strategy: str) -> None:
    expected = in_bf16("single", 1)
    torch.testing.assert_close(run_on_ranks(2, in_bf16, strategy, 2)[0], expected, rtol=0.02, atol=0.02)


# ---- layers that are left out ---------------------------------------------------------------------------------------


class Turns(nn.Module):
    """Layers of which each call skips one, given by its number; ``-1`` skips the last in all calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, skipped: int) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped % 3:
                x = x + torch.tanh(layer(x))
        return x


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.2),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.2),
}


def in_turns(fabric: Any, kind: str, equal: bool, path: str = "") -> list[Tensor]:
    """Train with a layer left out of each step, the same on all ranks or not; return the weights as outputs."""
    torch.manual_seed(0)
    net = Turns()
    model, optimizer = fabric.setup(net, OPTIMIZERS[kind](net.parameters()))
    rows = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(1))
    ranks, rank = fabric.world_size, fabric.global_rank
    for step, x in enumerate(rows):
        if path and step == 3:
            fabric.save_state(path)
            for parameter in net.parameters():
                with torch.no_grad():
                    parameter.zero_()
            fabric.load_state(path)
        parts = list(zip(x.split(2), (step, step) if equal else (step, step + 1), strict=True))
        mine = parts if ranks == 1 else [parts[rank]]
        fabric.backward(sum(model(part, skipped).square().mean() for part, skipped in mine) / len(mine))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outputs = [model(torch.eye(3), skipped).clone() for skipped in range(3)]
    fabric.free_memory()
    return outputs


def left_out(place: str, path: str) -> list[list[Tensor]]:
    fabric = Fabric(accelerator="cpu", devices="auto", strategy=DeepSpeedStrategy(**PLACES[place]))
    return [in_turns(fabric, *case, path + "-".join(map(str, case))) for case in left_out_cases(place)]


def left_out_cases(place: str) -> list[tuple[str, bool]]:
    """Return optimizers, and whether all ranks leave out the same layer: under stage 3 they must."""
    return [("AdamW", True), ("SGD", True)] if "3" in place else [("AdamW", False), ("SGD", True), ("SGD", False)]


@pytest.mark.parametrize("place", PLACES)
def test_a_parameter_without_a_gradient_is_left_out_of_the_update(place: str, tmp_path: Any) -> None:
    single = Fabric(accelerator="cpu", devices=1, strategy="single")
    expected = [in_turns(single, *case) for case in left_out_cases(place)]
    for found in run_on_ranks(2, left_out, place, str(tmp_path / "state")):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Manual(TrainModule):
    """Adds up two backward passes, changes the gradients between and after them, and uses its layers in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 1), nn.Linear(5, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        layer = self.second if batch_idx % 2 else self.first
        other = self.first if batch_idx % 2 else self.second
        optimizer.zero_grad()
        self.manual_backward((layer(batch[0]).squeeze(1) - batch[1]).square().mean())
        assert layer.weight.grad is not None
        layer.weight.grad.mul_(0.5)
        self.manual_backward((layer(2 * batch[0]).squeeze(1) - batch[1]).square().mean())
        assert other.weight.grad is None
        nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.2)


def by_hand(strategy: Any, ranks: int) -> list[Tensor]:
    module = Manual()
    silent_trainer(strategy=strategy, devices=ranks, max_epochs=1).fit(module, data(ranks))
    return [one.detach().clone() for one in module.parameters()]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "zero2-offload"])
def test_manual_optimization_changes_gradients_and_leaves_layers_out(strategy: str) -> None:
    expected = by_hand("single", 1)
    torch.testing.assert_close(run_on_ranks(2, by_hand, strategy, 2)[0], expected, rtol=1e-4, atol=1e-5)


# ---- a loss of parameters, and derivatives ---------------------------------------------------------------------------


class Penalized(TrainModule):
    """Adds to the loss what the parameters, or the gradient of its output, give."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        self.kind, self.kept = kind, list(self.net.parameters())
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        if self.kind == "slope":
            x = x.clone().requires_grad_(True)
            (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        else:
            penalty = sum(one.abs().sum() for one in (self.kept if self.kind == "kept" else self.parameters())) * 0.1
        loss: Tensor = (self.net(x).squeeze(1) - y).square().mean() + penalty
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        # Reading them all ends what DeepSpeed has begun to gather for the next step.
        if self.kind != "unread":
            self.norms.append(float(nn.utils.parameters_to_vector(self.parameters()).norm()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def penalized(strategy: Any, ranks: int) -> list[Any]:
    found = []
    for kind in ("parameters", "kept", "slope", "unread"):
        module = Penalized(kind)
        silent_trainer(strategy=strategy, devices=ranks, max_epochs=1).fit(module, data(ranks))
        found.append(({name: one.detach().clone() for name, one in module.named_parameters()}, module.norms))
    return found


@pytest.mark.parametrize(("strategy", "ranks"), [("zero2", 2), ("zero3", 2), ("zero3", 1), ("zero3-offload", 2)])
def test_a_loss_may_depend_on_parameters_and_on_derivatives(strategy: str, ranks: int) -> None:
    expected = penalized("single", 1)
    torch.testing.assert_close(run_on_ranks(ranks, penalized, strategy, ranks)[0], expected, rtol=1e-4, atol=1e-5)


# ---- refusals --------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


def attempt(fabric: Any, what: str) -> None:
    net: Any = Twice()
    if what == "dtypes":
        net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(torch.bfloat16))
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    if what == "copy":
        copy.deepcopy(net)
    elif what == "data":
        net.layer.weight.data = torch.zeros(2, 2)
    fabric.backward(model(torch.ones(2, 3, requires_grad=True)).sum())


def refused(strategy: str, what: str) -> str:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    with pytest.raises(ConfigurationError) as caught:
        attempt(fabric, what)
    fabric.free_memory()
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "what", "name"),
    [
        ("zero2", "twice", "layer.bias"),
        ("zero3", "twice", "layer.bias"),
        ("zero2", "dtypes", "1.weight"),
        ("zero3", "dtypes", "1.weight"),
        ("zero3", "copy", "Twice"),
        ("zero2", "data", "(2, 2)"),
        ("zero3", "data", "(2, 2)"),
    ],
)
def test_what_the_engine_cannot_do_is_refused(strategy: str, what: str, name: str) -> None:
    says(run_on_ranks(2, refused, strategy, what), name)
