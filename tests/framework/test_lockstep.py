"""Strategies whose passes hold collectives: no rank may run fewer of them than others, whatever its data and steps do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import network, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from phalanx import Callback, TrainModule
from phalanx.framework.errors import LoopError
from phalanx.framework.strategy import StepFunction, Traits
from phalanx.strategies.ddp import DDPStrategy

LR = 0.2


class Met(torch.autograd.Function):
    """A collective in forward and in backward, which notices ranks that are at different places."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, place: int) -> Tensor:
        ctx.place = place
        meet(place)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        meet(-ctx.place)
        return gradients[0], None


def meet(place: int) -> None:
    told = torch.tensor([float(place), float(place) ** 2])
    dist.all_reduce(told)
    assert told.tolist() == [place * dist.get_world_size(), place**2 * dist.get_world_size()], "ranks are not in step"


class Lockstep(DDPStrategy):
    """Meets other ranks in every layer, forward and backward, as strategies do that gather weights."""

    name = "lockstep"
    traits = Traits(lockstep_forward=True, lockstep_backward=True)

    def setup(self, module: nn.Module, optimizers: Sequence[Optimizer], training: bool) -> list[Optimizer]:
        ready = super().setup(module, optimizers, training)
        layers = [part for part in module.modules() if isinstance(part, nn.Linear)]
        self.handles = [
            layer.register_forward_hook(partial(self._meet, number)) for number, layer in enumerate(layers, 2)
        ]
        return ready

    @staticmethod
    def _meet(number: int, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        met: Tensor = Met.apply(output, number)  # type: ignore[no-untyped-call]
        return met

    def route(self, step: StepFunction, training: bool) -> StepFunction:
        routed = super().route(step, training)

        def meeting(*arguments: Any) -> Any:
            meet(1)
            return routed(*arguments)

        return meeting

    def idle_backward(self) -> None:
        raise AssertionError("a rank must run a stand-in")

    def contributed(self) -> bool:
        raise AssertionError("nothing here tells")

    def teardown(self) -> None:
        for handle in self.handles:
            handle.remove()
        super().teardown()


class InBackward(Lockstep):
    """Meets other ranks in the backward pass alone."""

    name = "in backward"
    traits = Traits(lockstep_backward=True)

    @staticmethod
    def _meet(number: int, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        if output.requires_grad:
            output.register_hook(lambda gradient: meet(-number))
        return output

    def route(self, step: StepFunction, training: bool) -> StepFunction:
        return DDPStrategy.route(self, step, training)


def strategy(name: str) -> Any:
    return {"lockstep": Lockstep, "in backward": InBackward}.get(name, lambda: name)()


# ---- training -------------------------------------------------------------------------------------------------------


class Fickle(TrainModule):
    """Has no loss where ``rule`` says so, before or after its model has run; notes what it was given."""

    def __init__(self, rule: str, when: str) -> None:
        super().__init__()
        self.net = network()
        self.rule, self.when = rule, when
        self.given: list[tuple[int, bool, Tensor, Tensor]] = []

    def silent(self, index: int) -> bool:
        rank = self.global_rank
        return {
            "never": False,
            "alternate": (index + rank) % 2 == 0,
            "together": index in (0, 2, 3),
            "one rank": rank == 1 and index > 0,
            "first": rank == 0 and index < 3,
        }[self.rule]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        # Stand-ins are not seen here.
        self.given.append((batch_idx, not self.silent(batch_idx), batch["x"], batch["y"]))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        # Takes the batch apart, as many a step does.
        y, x = batch.pop("y"), batch.pop("x")
        if self.when == "before" and self.silent(batch_idx):
            return None
        loss = nn.functional.mse_loss(self.net(x), y)
        if self.when == "after" and self.silent(batch_idx):
            return None
        if self.when == "infinite" and self.silent(batch_idx):
            return self.infinite(x)
        self.log("loss", loss, on_epoch=True)
        return loss

    def infinite(self, x: Tensor) -> None:
        """Run the rest of a model whose activations are infinite, and give no loss."""
        return None

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def pairs(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 6, generator=generator)
    return [{"x": row, "y": torch.sin(row.sum(0, keepdim=True))} for row in x]


class Items(IterableDataset[Any]):
    """The same without a length."""

    def __init__(self, count: int) -> None:
        self.rows = pairs(count)

    def __iter__(self) -> Any:
        return iter(self.rows)


Given = list[tuple[int, bool, Tensor, Tensor]]


def fickle(name: str, rule: str, when: str, window: Any, count: int, length: bool) -> tuple[int, Given, list[Tensor]]:
    module = Fickle(rule, when)
    data = DataLoader(pairs(count) if length else Items(count), batch_size=2)  # type: ignore[arg-type]
    trainer = silent_trainer(
        devices=dist.get_world_size(), strategy=strategy(name), max_epochs=1, accumulate_grad_batches=window
    )
    trainer.fit(module, data)
    assert not module._forward_hooks
    assert not module.net._forward_hooks
    weights = [parameter.detach() for parameter in module.net.parameters()]
    return trainer.global_step, module.given, weights


def by_hand(ranks: list[Given], window: int) -> tuple[int, list[Tensor]]:
    """Train on what all ranks were given, in one process: a batch without a loss keeps its weight in the mean."""
    net = network()
    steps = 0
    last = max(index for given in ranks for index, *_ in given)
    for first in range(0, last + 1, window):
        batches = [item for given in ranks for item in given if first <= item[0] < first + window]
        if not any(counts for _, counts, *_ in batches):
            continue
        net.zero_grad()
        for _, counts, x, y in batches:
            if counts:
                (nn.functional.mse_loss(net(x), y) / len(batches)).backward()
        with torch.no_grad():
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter -= LR * parameter.grad
        steps += 1
    return steps, [parameter.detach() for parameter in net.parameters()]


def check_fickle(results: list[tuple[int, Given, list[Tensor]]], window: int, count: int) -> None:
    steps, expected = by_hand([given for _, given, _ in results], window)
    seen = torch.cat([x for _, given, _ in results for _, _, x, _ in given])
    assert sorted(seen[:, 0].tolist()) == sorted(row["x"][0].item() for row in pairs(count))
    for own_steps, _, weights in results:
        assert own_steps == steps
        for weight, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(weight, other, rtol=1e-5, atol=1e-6)


RULES = ["never", "alternate", "together", "one rank", "first"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("name", ["lockstep", "in backward"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_may_return_none_on_any_rank_at_any_time(
    ranks: int, name: str, window: int, when: str, rule: str
) -> None:
    check_fickle(run_on_ranks(ranks, fickle, name, rule, when, window, 47, True, timeout=30), window, 47)


@pytest.mark.parametrize("length", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 13, 17])
@pytest.mark.parametrize("name", ["lockstep", "in backward"])
def test_ranks_may_have_any_number_of_batches_or_none_at_all(name: str, count: int, length: bool) -> None:
    results = run_on_ranks(3, fickle, name, "never", "before", 2, count, length, timeout=30)
    check_fickle(results, 2, count)
