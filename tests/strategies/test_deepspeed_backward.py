"""Under DeepSpeed, loops with several backward passes, closures and outputs of any kind train as in one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mixture import PLACES
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Fabric
from phalanx.framework.core.errors import ConfigurationError, LoopError
from phalanx.strategies import DeepSpeedStrategy

STEPS = 2


class Net(nn.Module):
    """Two layers and a parameter of its own, of which ``extra`` is used only on demand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.extra = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.full((3,), 0.7))

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x))) * self.scale
        added: Tensor = y + self.extra(y) if more else y
        return added


def two_forwards(fabric: Any, net: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    fabric.backward(net(x, more=True).square().mean())
    fabric.backward(net(2 * x).square().mean())
    optimizer.step()


def one_loss_of_two_forwards(fabric: Any, net: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    fabric.backward(net(x, more=True).square().mean() + net(2 * x).square().mean())
    optimizer.step()


def forwards_before_backwards(fabric: Any, net: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    first, second = net(x).square().mean(), net(2 * x, more=True).square().mean()
    fabric.backward(first)
    fabric.backward(second)
    optimizer.step()


def one_graph_twice(fabric: Any, net: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    y = net(x, more=True)
    fabric.backward(y.square().mean(), retain_graph=True)
    fabric.backward((y + 1).square().mean())
    optimizer.step()


def closure(fabric: Any, net: Any, optimizer: Any, x: Tensor) -> None:
    def compute() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = net(x, more=True).square().mean()
        fabric.backward(loss)
        return loss

    assert optimizer.step(compute).item() > 0


def windows(fabric: Any, net: Any, optimizer: Any, x: Tensor) -> None:
    for part in x.split(2):
        with fabric.accumulate(net):
            fabric.backward(net(part, more=True).square().mean())
            fabric.backward(net(2 * part).square().mean())
            optimizer.step()
            optimizer.zero_grad()


def clipped_between(fabric: Any, net: Any, optimizer: Any, x: Tensor) -> None:
    optimizer.zero_grad()
    fabric.backward(net(x, more=True).square().mean())
    first = float(fabric.clip_gradients(net, optimizer, max_norm=1e6))
    fabric.backward(net(2 * x).square().mean())
    assert float(fabric.clip_gradients(net, optimizer, max_norm=0.01)) != first
    optimizer.step()


def dropped(fabric: Any, net: Any, optimizer: Any, x: Tensor) -> None:
    fabric.backward(net(x, more=True).square().mean())
    net.zero_grad()
    fabric.backward((net(3 * x) + 1).square().mean())
    optimizer.zero_grad()
    fabric.backward(net(2 * x, more=True).square().mean())
    optimizer.step()
    optimizer.zero_grad()


LOOPS: list[Callable[..., None]] = [
    two_forwards,
    one_loss_of_two_forwards,
    forwards_before_backwards,
    one_graph_twice,
    closure,
    windows,
    clipped_between,
    dropped,
]


def run_loops(fabric: Any) -> dict[str, Tensor]:
    """Run all loops on one module, whose set-up takes longest; return its outputs after each."""
    outputs, x = {}, torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    net = Net()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5))
    for loop in LOOPS:
        for _ in range(STEPS):
            loop(fabric, net, optimizer, x)
        optimizer.zero_grad()
        with torch.no_grad():
            outputs[loop.__name__] = net(torch.eye(6), more=True).clone()
    fabric.free_memory()
    return outputs


def loops_on_rank(place: str, precision: str) -> dict[str, Tensor]:
    strategy = DeepSpeedStrategy(**PLACES[place])
    return run_loops(Fabric(accelerator="cpu", devices="auto", strategy=strategy, accumulate=2, precision=precision))


@pytest.mark.parametrize(
    ("place", "ranks", "precision"),
    [
        *((place, 2, "32-true") for place in PLACES),
        ("zero3", 3, "32-true"),
        *((place, 2, "bf16-mixed") for place in ("zero1", "zero3-offload")),
    ],
)
def test_backward_passes_before_an_update_add_up(place: str, ranks: int, precision: str) -> None:
    expected = run_loops(Fabric(accelerator="cpu", devices=1, strategy="single", accumulate=2))
    rtol, atol = (1e-4, 1e-5) if precision == "32-true" else (0.02, 0.02)
    for found in run_on_ranks(ranks, loops_on_rank, place, precision):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


# ---- several modules ------------------------------------------------------------------------------------------------


def adversaries(fabric: Any, names_model: bool) -> list[Tensor]:
    """Train a generator through a critic, whose gradients of the generator's loss are dropped."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(6, 4), nn.Linear(4, 3)
    generator, of_generator = fabric.setup(generator, torch.optim.SGD(generator.parameters(), lr=0.1))
    critic, of_critic = fabric.setup(critic, torch.optim.SGD(critic.parameters(), lr=0.1))
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    for _ in range(STEPS):
        critic.zero_grad()
        fabric.backward(critic(generator(x).detach()).square().mean(), **({"model": critic} if names_model else {}))
        fabric.backward(critic(x[:, :4]).square().mean(), **({"model": critic} if names_model else {}))
        of_critic.step()
        of_generator.zero_grad()
        fabric.backward(critic(generator(x)).square().mean(), **({"model": generator} if names_model else {}))
        of_generator.step()
    with torch.no_grad():
        outputs = [generator(torch.eye(6)).clone(), critic(torch.eye(4)).clone()]
    fabric.free_memory()
    return outputs


def adversaries_on_rank(stage: int) -> list[list[Tensor]]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DeepSpeedStrategy(stage=stage))
    return [adversaries(fabric, names_model) for names_model in (True, False)]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_loss_may_depend_on_several_modules(stage: int) -> None:
    expected = adversaries(Fabric(accelerator="cpu", devices=1, strategy="single"), True)
    for named, unnamed in run_on_ranks(2, adversaries_on_rank, stage):
        torch.testing.assert_close(named, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(unnamed, expected, rtol=1e-4, atol=1e-5)


def refusals(stage: int) -> list[str]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=DeepSpeedStrategy(stage=stage))
    x, messages = torch.ones(2, 6), []
    loss = fabric.setup(nn.Linear(6, 4))(x).mean()
    with pytest.raises(ConfigurationError) as caught:
        fabric.backward(loss)
    messages.append(str(caught.value))
    fabric.free_memory()
    net = nn.Linear(6, 4)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    fabric.backward(model(x).mean())
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)) > 0.1
    assert float(torch.nn.utils.get_total_norm([one.grad for one in net.parameters() if one.grad is not None])) < 0.11
    optimizer.step()
    with pytest.raises(LoopError) as late:
        _ = net.weight.grad
    assert "on_before_optimizer_step" in str(late.value)
    optimizer.zero_grad()
    assert net.weight.grad is None
    other = nn.Parameter(torch.ones(2))
    other.grad = torch.ones(2)
    torch.nn.utils.clip_grad_norm_([other], 0.1)
    assert float(other.grad.norm()) < 0.11
    fabric.free_memory()
    return messages


@pytest.mark.parametrize("stage", [1, 3])
def test_what_the_engine_cannot_do_is_refused_in_one_sentence(stage: int) -> None:
    for messages in run_on_ranks(2, refusals, stage):
        assert "was set up without one: call setup(module, optimizer)" in messages[0]


# ---- outputs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frozen:
    loss: Tensor
    kind: str = "frozen"


class Slots(Mapping[str, Any]):
    """A mapping whose constructor takes no dict."""

    __slots__ = ("__dict__", "_loss")

    def __init__(self, loss: Tensor, *, kind: str) -> None:
        self._loss, self.kind = loss, kind
        self.tensors = {"loss": loss}

    def __getitem__(self, key: str) -> Any:
        return self.tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


class Held:
    def __init__(self, loss: Tensor) -> None:
        self.parts = [{1: loss}]
        self.itself = self


OUTPUTS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "OrderedDict": (lambda loss: OrderedDict({"loss": loss, "text": "a"}), lambda output: output["loss"]),
    "dataclass": (Frozen, lambda output: output.loss),
    "Mapping": (lambda loss: Slots(loss, kind="own"), lambda output: output["loss"]),
    "object": (Held, lambda output: output.parts[0][1]),
    "Normal": (lambda loss: torch.distributions.Normal(loss, 1.0), lambda output: output.loc),
    "set": (lambda loss: {loss}, lambda output: next(iter(output))),
}


class Inner(nn.Module):
    """Multiplies by a parameter of its own, which the backward pass needs too."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 4), 0.5))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        loss = (x @ self.weight @ self.weight).square().mean()
        return OUTPUTS[self.kind][0](loss)


class Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), Inner(kind)
        self.last: Any = None

    def forward(self, x: Tensor) -> Any:
        self.last = self.inner(torch.tanh(self.first(x)))
        return self.last


def outputs(fabric: Any) -> dict[str, Tensor]:
    found, x = {}, torch.linspace(-1, 1, 8).view(2, 4)
    for kind, (_, loss_of) in OUTPUTS.items():
        torch.manual_seed(0)
        net = Outer(kind)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for _ in range(2):
            output = model(x)
            assert output is net.last, kind
            optimizer.zero_grad()
            fabric.backward(loss_of(output))
            optimizer.step()
        with torch.no_grad():
            found[kind] = loss_of(model(x)).clone()
        fabric.free_memory()
    return found


def outputs_on_rank(stage: int) -> dict[str, Tensor]:
    return outputs(Fabric(accelerator="cpu", devices=2, strategy=DeepSpeedStrategy(stage=stage)))


@pytest.mark.parametrize("stage", [2, 3])
def test_an_output_of_any_kind_is_the_modules_own(stage: int) -> None:
    expected = outputs(Fabric(accelerator="cpu", devices=1, strategy="single"))
    for found in run_on_ranks(2, outputs_on_rank, stage):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
