"""Gradients under ``fsdp``: norms, windows, clipping, what is unused or narrow."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from models import network, plain_steps
from ranks import run_on_ranks
from small_gpt import SmallGPT, connected, loss_of, optimizer_of, small_gpt, token_data
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode

from phalanx import Fabric
from phalanx.framework.core.optimizer_config import parameters_of
from phalanx.strategies import FSDPStrategy

NORMS = [2.0, 1.0, 3.0, 0.0, math.inf, -math.inf, 0.5]


def passed(strategy: FSDPStrategy, module: nn.Module, sync: bool = True, first: int = 0) -> float:
    """Run a forward and a backward pass on this rank's part of a batch; return the loss."""
    x, y = token_data(24).tensors
    rank, size = strategy.world.rank, strategy.world.size
    mine = slice(first + rank * 12 // size, first + (rank + 1) * 12 // size)
    strategy.sync_gradients(sync)
    loss: Tensor = strategy.route(lambda: loss_of(module(x[mine]), y[mine]), training=True)()
    strategy.backward(loss)
    return loss.item()


def ready(gpt: nn.Module, precision: str = "32-true", **arguments: Any) -> tuple[FSDPStrategy, torch.optim.Optimizer]:
    optimizer = optimizer_of(gpt)
    strategy = connected(FSDPStrategy(**arguments), precision)
    strategy.setup(gpt, [optimizer], training=True)
    return strategy, optimizer


def plain_gradients(windows: int = 1) -> SmallGPT:
    gpt, (x, y) = small_gpt(), token_data(24).tensors
    for window in range(windows):
        part = slice(window * 12, window * 12 + 12)
        loss_of(gpt(x[part]), y[part]).backward()
    return gpt


def norms(arguments: dict[str, Any]) -> tuple[list[Tensor], Tensor, dict[str, Tensor | None]]:
    gpt = small_gpt()
    strategy, optimizer = ready(gpt, **arguments)
    passed(strategy, gpt)
    parameters = parameters_of(optimizer)
    found = [strategy.gradients.norm(parameters, each) for each in NORMS]
    strategy.gradients.clip_by_norm(parameters, 0.05, found[0])
    clipped = strategy.gradients.norm(parameters)
    strategy.gradients.scale(parameters, 20.0)
    return found, clipped, {name: strategy.gradients.full(each) for name, each in gpt.named_parameters()}


@pytest.mark.parametrize(("ranks", "arguments"), [(1, {}), (3, {}), (2, {"replicas": 2})])
def test_norms_and_clipping_are_those_of_the_whole_gradient(ranks: int, arguments: dict[str, Any]) -> None:
    gpt = plain_gradients()
    gradients = [each.grad for each in gpt.parameters() if each.grad is not None]
    expected = [nn.utils.get_total_norm(gradients, each) for each in NORMS]
    nn.utils.clip_grad_norm_(gpt.parameters(), 0.05)
    for found, clipped, whole in run_on_ranks(ranks, norms, arguments):
        for own, each, kind in zip(found, expected, NORMS, strict=True):
            assert own.shape == ()
            assert own.dtype == torch.float32
            # Its least element and its zeros are known to rounding only.
            if kind not in (0.0, -math.inf):
                torch.testing.assert_close(own, each, rtol=1e-5, atol=0)
        assert clipped.item() == pytest.approx(0.05, rel=1e-4)
        for name, parameter in gpt.named_parameters():
            assert (whole[name] is None) == (parameter.grad is None), name
            if parameter.grad is not None:
                torch.testing.assert_close(whole[name], parameter.grad * 20.0, rtol=1e-4, atol=1e-6)


def windowed() -> tuple[list[int], dict[str, Tensor | None], float]:
    """Count reductions in each micro-batch of a window; abandon a window; forget a pass without backward."""
    gpt = small_gpt()
    strategy, optimizer = ready(gpt)
    # A window that never ends.
    passed(strategy, gpt, sync=False)
    strategy.zero_grad(optimizer)
    counts = []
    for window, sync in ((0, False), (1, True)):
        with CommDebugMode() as communication:
            passed(strategy, gpt, sync, first=12 * window)
        names = {str(name): count for name, count in communication.get_comm_counts().items()}
        counts.append(sum(count for name, count in names.items() if "reduce" in name))
    gradients = {name: strategy.gradients.full(each) for name, each in gpt.named_parameters()}
    x, y = token_data(24).tensors
    forward = strategy.route(lambda: loss_of(gpt(x[:12]), y[:12]), training=True)
    forward()
    strategy.step(optimizer)
    return counts, gradients, forward().item()


def test_a_window_is_reduced_once_and_an_abandoned_one_never() -> None:
    gpt, (x, y) = plain_gradients(windows=2), token_data(24).tensors
    results = run_on_ranks(2, windowed)
    for counts, gradients, _ in results:
        # Four modules, and the exchange of the parameters that the ranks have used, which the first windows have.
        assert counts == [0, 5]
        for name, parameter in gpt.named_parameters():
            assert (gradients[name] is None) == (parameter.grad is None)
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    optimizer_of(gpt).step()
    expected = loss_of(gpt(x[:12]), y[:12]).item()
    assert all(after == pytest.approx(expected, rel=1e-5) for _, _, after in results)


# ---- narrow ----------------------------------------------------------------------------------------------------------


SAME = torch.linspace(-1, 1, 6 * 16).view(16, 1, 6)


def narrow_model() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(16, 6), nn.Linear(6, 1))
    return module, torch.optim.SGD(module.parameters(), lr=0.05)


def narrow_loss(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        loss: Tensor = (module(x).float() - x.sum((1, 2))[:, None]).square().mean()
    return loss


def narrow() -> tuple[list[float], set[torch.dtype], set[torch.dtype]]:
    """Train in windows of two micro-batches; return the losses and the dtypes of weights and gradients."""
    module, optimizer = narrow_model()
    strategy = connected(FSDPStrategy(units=nn.Linear), "bf16-mixed")
    strategy.setup(module, [optimizer], training=True)
    losses = []
    for _ in range(5):
        strategy.zero_grad(optimizer)
        for is_last in (False, True):
            strategy.sync_gradients(is_last)
            value = strategy.route(lambda: narrow_loss(module, SAME), training=True)()
            strategy.backward(value / 2)
        strategy.step(optimizer)
        losses.append(value.item())
    gradients = {each.grad.dtype for each in module.parameters() if each.grad is not None}
    return losses, {each.dtype for each in module.parameters()}, gradients


def test_bf16_mixed_keeps_weights_and_reduces_in_fp32() -> None:
    module, optimizer = narrow_model()
    losses = plain_steps(optimizer, lambda x: narrow_loss(module, x), [SAME] * 5)
    for own, dtypes, gradients in run_on_ranks(2, narrow):
        assert own == pytest.approx(losses, rel=2e-2)
        assert dtypes == gradients == {torch.float32}


def accumulated(shards: bool) -> tuple[list[bool], Tensor]:
    """Train two windows of three micro-batches; return whether there were gradients after each, and the weights."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=FSDPStrategy(accumulate_shards=shards), accumulate=3)
    fabric.launch()
    net = network()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.linspace(-1, 1, 6 * 24).view(6, 4, 6)[:, fabric.global_rank :: 2]
    found = []
    for batch in x:
        with fabric.accumulate(model):
            fabric.backward(model(batch).square().mean())
            found.append(all(parameter.grad is not None for parameter in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()
    # Rank 0 has all weights.
    weights = [each.flatten() for each in fabric.full_state_dict(model).values()]
    return found, torch.cat(weights) if weights else torch.empty(0)


def test_shards_of_gradients_are_accumulated() -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plain_steps(optimizer, lambda rows: net(rows).square().mean(), torch.linspace(-1, 1, 6 * 24).view(-1, 6).split(12))
    expected = torch.cat([each.detach().flatten() for each in net.state_dict().values()])
    for shards in (False, True):
        (found, weights), _ = run_on_ranks(2, accumulated, shards)
        assert found == ([True] * 6 if shards else [False, False, True] * 2)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)
