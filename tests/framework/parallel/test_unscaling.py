"""Gradients that a loss scale multiplied: divided and checked in one pass, as two passes would."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Regressor, loader, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from phalanx.framework.checkpoint.finite_check import scale_and_check
from phalanx.framework.core.precision import LossScaler, resolve_precision
from phalanx.framework.parallel.gradient_operations import GradientOperations
from phalanx.framework.parallel.optimizer_step import Updater
from phalanx.strategies import FSDPStrategy, SingleDeviceStrategy, Strategy
from phalanx.strategies.fsdp.gradients import local_gradients


class Passes(TorchDispatchMode):
    """Notes the operators that go through many tensors at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if "foreach" in name:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def tensors(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).mul(1e4).to(dtype) for size in (1, 1000, 0, 33)]


@pytest.mark.parametrize("scale", [65536.0, 1000.0, 0.75])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
@pytest.mark.parametrize("planted", [None, float("nan"), float("-inf")])
def test_the_values_are_those_of_a_multiplication(dtype: torch.dtype, scale: float, planted: float | None) -> None:
    found, expected = tensors(dtype), tensors(dtype)
    if planted is not None:
        found[1][5] = expected[1][5] = planted
    torch._foreach_mul_(expected, 1.0 / scale)
    assert scale_and_check(found, 1.0 / scale) == (planted is None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_sparse_gradients_and_none_at_all() -> None:
    assert scale_and_check([], 0.5)
    sparse = torch.eye(3).to_sparse()
    assert scale_and_check([torch.ones(2), sparse], 0.5)
    assert torch.equal(sparse.to_dense(), torch.eye(3) / 2)
    assert not scale_and_check([torch.ones(2), torch.full((3, 3), torch.inf).to_sparse()], 0.5)


class OwnGradients(GradientOperations):
    """Operations of a strategy that knows nothing of a common pass."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def scale(self, parameters: Any, factor: float) -> None:
        self.calls.append("scale")
        super().scale(parameters, factor)

    def are_finite(self, parameters: Any) -> bool:
        self.calls.append("are_finite")
        return super().are_finite(parameters)


def updated(strategy: Strategy, unscales_before: bool) -> tuple[list[str], Tensor]:
    weight = nn.Parameter(torch.zeros(3))
    weight.grad = torch.tensor([256.0, 512.0, -256.0])
    optimizer = torch.optim.SGD([weight], lr=1.0, foreach=False)
    updater = Updater(strategy, LossScaler(256.0))
    updater.guard(False, None)
    with Passes() as passes:
        if unscales_before:
            updater.unscale(optimizer)
        assert updater(optimizer)
    return passes.names, weight.detach()


@pytest.mark.parametrize("unscales_before", [False, True])
def test_an_update_goes_through_scaled_gradients_once(unscales_before: bool) -> None:
    names, weight = updated(SingleDeviceStrategy(), unscales_before)
    check = "_amp_foreach_non_finite_check_and_unscale_"
    assert names == (["_foreach_mul_", check] if unscales_before else [check])
    assert weight.tolist() == [-1.0, -2.0, 1.0]


def test_operations_of_ones_own_are_both_called() -> None:
    strategy = SingleDeviceStrategy()
    strategy.gradients = own = OwnGradients()
    assert updated(strategy, False)[1].tolist() == [-1.0, -2.0, 1.0]
    assert own.calls == ["scale", "are_finite"]


def sharded(planted: bool) -> tuple[bool, bool, list[str]]:
    """Scale shards of gradients, of which one element on rank 1 may be infinite."""
    strategy = FSDPStrategy(units=nn.Linear)
    world = strategy.connect("cpu", 1, resolve_precision("32-true"))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    strategy.setup(module, [optimizer], training=True)
    strategy.route(module, training=True)(torch.ones(2, 4)).sum().backward()
    parameters = list(module.parameters())
    shards = local_gradients(parameters)
    if planted and world.rank == 1:
        shards[0][0] = torch.inf
    expected = [shard / 1000.0 for shard in shards]
    with Passes() as passes:
        is_finite = strategy.gradients.scale_and_check(parameters, 1.0 / 1000.0)
    same = all(torch.allclose(shard, other, rtol=1e-6) for shard, other in zip(shards, expected, strict=True))
    strategy.teardown()
    world.close()
    return is_finite, same, passes.names


@pytest.mark.parametrize("planted", [False, True])
def test_all_ranks_agree_on_their_shards(planted: bool) -> None:
    result = (not planted, True, ["_amp_foreach_non_finite_check_and_unscale_"])
    assert run_on_ranks(2, sharded, planted) == [result] * 2


def trained_in_windows(data: DataLoader[Any]) -> Tensor:
    module = Regressor(optimizer="sgd")
    trainer = silent_trainer(
        devices=1, strategy="single", precision="16-mixed", max_epochs=2, accumulate_grad_batches=2
    )
    trainer.fit(module, data)
    return weights_of(module)


def test_a_short_last_window_has_the_loss_scale_alone() -> None:
    data, scale = loader(9, 2), LossScaler().scale
    module, batches = Regressor(optimizer="sgd"), list(data)
    optimizer = module.configure_optimizers()
    for window in 2 * (batches[:2], batches[2:4], batches[4:]):
        optimizer.zero_grad()
        for batch in window:
            with torch.autocast("cpu", torch.float16):
                loss = module.training_step(batch, 0)
            (loss * (scale / len(window))).backward()
        if scale_and_check(local_gradients(module.parameters()), 1.0 / scale):
            optimizer.step()
        else:
            scale *= 0.5
    torch.testing.assert_close(trained_in_windows(data), weights_of(module), rtol=1e-5, atol=1e-6)
