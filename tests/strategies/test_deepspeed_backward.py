"""Under DeepSpeed, loops with several backward passes, closures and outputs of any kind train as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from mixture import PLACES
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Fabric
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
        return y + self.extra(y) if more else y


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
        loss = net(x, more=True).square().mean()
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
        *((place, 3, "32-true") for place in ("zero1", "zero3")),
        *((place, 2, "bf16-mixed") for place in ("zero1", "zero2", "zero2-offload", "zero3-offload")),
    ],
)
def test_backward_passes_before_an_update_add_up(place: str, ranks: int, precision: str) -> None:
    expected = run_loops(Fabric(accelerator="cpu", devices=1, strategy="single", accumulate=2))
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if precision == "32-true" else {"rtol": 0.02, "atol": 0.02}
    for found in run_on_ranks(ranks, loops_on_rank, place, precision):
        torch.testing.assert_close(found, expected, **tolerance)
