"""Accumulation in a user's own loop: updates are those of the weighted mean over the window, on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from phalanx import AccumulationSchedule, Fabric
from phalanx.framework.core.errors import ConfigurationError, NonFiniteError


def line_model() -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


ONE = torch.ones(1, 1)


def line(lr: float = 1.0, **settings: Any) -> tuple[Fabric, Any, Any]:
    """Return a Fabric, a model whose output is its weight, which is zero, and SGD."""
    fabric, original = Fabric(accelerator="cpu", **settings), line_model()
    return fabric, *fabric.setup(original, torch.optim.SGD(original.parameters(), lr=lr))


# ---- parity with a hand-written loop ---------------------------------------------------------------------------------


def regression(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def micro_batches(count: int, width: int, ranks: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Return for each round the micro-batches of the ranks that have data."""
    inputs, targets = regression(count).tensors
    rounds = []
    for begin in range(0, count, width * ranks):
        x, y = inputs[begin : begin + width * ranks], targets[begin : begin + width * ranks]
        parts = list(zip(x.tensor_split(ranks), y.tensor_split(ranks), strict=True))
        rounds.append([part for part in parts if len(part[0])])
    return rounds


def weight_of(x: Tensor) -> int:
    """Return a weight of rows, as the number of their tokens is one."""
    return 1 + int((x > 0).sum())


def begin(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Update once, so that the optimizer has state."""
    mse_loss(model(torch.ones(2, 4)), torch.ones(2, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


def hand_written(ranks: int, accumulate: int, is_weighted: bool, is_begun: bool) -> tuple[list[Tensor], Tensor]:
    """Return the weights, and the last gradient of the first layer before it was clipped."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    if is_begun:
        begin(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rounds = micro_batches(21, 2, ranks)
    for _ in range(2):
        for first in range(0, len(rounds), accumulate):
            window = [part for each in rounds[first : first + accumulate] for part in each]
            weights = [weight_of(x) if is_weighted else 1 for x, _ in window]
            optimizer.zero_grad()
            for (x, y), weight in zip(window, weights, strict=True):
                (mse_loss(model(x), y) * (weight / sum(weights))).backward()
            gradient = torch.cat([each.grad.flatten() for each in model[0].parameters() if each.grad is not None])
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
    return [parameter.detach() for parameter in model.parameters()], gradient


def fabric_loop(
    strategy: str, accumulate: int, is_weighted: bool, zero_first: bool, is_begun: bool
) -> tuple[list[Tensor], Tensor]:
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices="auto", accumulate=accumulate)
    model = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    if is_begun:
        begin(model, optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = fabric.setup_scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    loader = fabric.setup_dataloaders(DataLoader(regression(21), batch_size=2))
    norms = []
    for _ in range(2):
        for x, y in loader:
            with fabric.accumulate(model):
                if zero_first:
                    optimizer.zero_grad()
                fabric.backward(mse_loss(model(x), y), weight=weight_of(x) if is_weighted else None)
                if fabric.sync_gradients:
                    fabric.unscale_gradients(optimizer)
                    found = [fabric.full_gradient(each) for each in model[0].parameters()]
                    gradient = torch.cat([each.flatten() for each in found if each is not None])
                norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.3))
                optimizer.step()
                scheduler.step()
                if not zero_first:
                    optimizer.zero_grad()
    assert sum(norm is not None for norm in norms) == optimizer.applied == scheduler.scheduler.last_epoch
    weights = [each.cpu() for each in fabric.full_state_dict(model).values()]
    fabric.free_memory()
    return weights, gradient


@pytest.mark.parametrize(
    ("strategy", "ranks", "accumulate", "is_weighted", "zero_first"),
    [
        ("single", 1, 1, False, False),
        ("single", 1, 4, True, True),
        ("ddp", 2, 1, True, True),
        ("ddp", 2, 4, False, False),
        *((strategy, 2, 4, True, False) for strategy in ("fsdp", "zero2", "zero3", "zero3-offload")),
    ],
)
def test_a_loop_with_clipping_equals_plain_torch_on_one_process(
    strategy: str, ranks: int, accumulate: int, is_weighted: bool, zero_first: bool
) -> None:
    # 21 samples: the last round is short, and on two ranks one of them has no data in it.
    is_begun = strategy == "fsdp"
    wanted, last = hand_written(ranks, accumulate, is_weighted, is_begun)
    arguments = (strategy, accumulate, is_weighted, zero_first, is_begun)
    for rank, (weights, gradient) in enumerate(run_on_ranks(ranks, fabric_loop, *arguments, timeout=120)):
        torch.testing.assert_close(gradient.cpu(), last, rtol=1e-4, atol=1e-6)
        # Under some strategies rank 0 alone has whole weights.
        assert weights or rank
        torch.testing.assert_close(weights, wanted if weights else [], rtol=1e-5, atol=1e-6)


def plain_loop(own_accumulation: int) -> list[Tensor]:
    fabric = Fabric(accelerator="cpu")
    original = network()
    model, optimizer = fabric.setup(original, torch.optim.AdamW(original.parameters(), lr=0.02))
    loader = fabric.setup_dataloaders(DataLoader(regression(21), batch_size=2))
    for number, (x, y) in enumerate(loader, 1):
        ends = number % own_accumulation == 0 or loader.end
        with fabric.no_backward_sync(model, enabled=not ends):
            fabric.backward(mse_loss(model(x), y))
        if ends:
            fabric.clip_gradients(model, optimizer, max_norm=0.3)
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in original.parameters()]


def test_a_plain_loop_weighs_a_rank_without_data_nothing() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for parts in micro_batches(21, 2, 2):
        optimizer.zero_grad()
        for x, y in parts:
            (mse_loss(model(x), y) / len(parts)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    for found in run_on_ranks(2, plain_loop, 1):
        torch.testing.assert_close(found, [p.detach() for p in model.parameters()], rtol=1e-5, atol=1e-6)


def test_a_loop_with_its_own_accumulation_keeps_ranks_identical() -> None:
    first, second = run_on_ranks(2, plain_loop, 3)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def skipped_backward() -> list[float]:
    fabric, model, optimizer = line(lr=0.1, accumulate=2)
    weights = []
    for number in range(4):
        with fabric.accumulate(model):
            loss = mse_loss(model(ONE), ONE)
            # Rank 1 leaves out the micro-batch that ends the first window, and both all of the second.
            if number == 0 or (number == 1 and fabric.global_rank == 0):
                fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        weights.append(model.weight.item())
    assert optimizer.applied == 1
    assert optimizer.step_was_skipped
    return weights


def test_a_rank_that_calls_no_backward_still_takes_part() -> None:
    first, second = run_on_ranks(2, skipped_backward)
    assert first == second
    # The gradient of the mean loss is -2 whatever the number of micro-batches it is over.
    assert first == pytest.approx([0.0, 0.2, 0.2, 0.2])


# ---- windows ---------------------------------------------------------------------------------------------------------


def boundaries(accumulate: Any, lengths: Sequence[int]) -> list[bool]:
    fabric, model, _ = line(accumulate=accumulate)
    found = []
    for length in lengths:
        for _ in fabric.setup_dataloaders(DataLoader(range(length), batch_size=1)):  # type: ignore[arg-type]
            with fabric.accumulate(model):
                found.append(fabric.sync_gradients)
    return found


def test_a_window_ends_at_the_factor_and_at_the_end_of_the_loader() -> None:
    assert boundaries(2, [3, 2]) == [False, True, True, False, True]
    assert boundaries(AccumulationSchedule.cycle([1, 2]), [4]) == [True, False, True, True]


def test_each_set_of_models_has_windows_of_its_own() -> None:
    fabric = Fabric(accelerator="cpu", accumulate=2)
    generator, critic = line_model(), line_model()
    first, first_optimizer = fabric.setup(generator, torch.optim.SGD(generator.parameters(), lr=1.0))
    second, second_optimizer = fabric.setup(critic, torch.optim.SGD(critic.parameters(), lr=1.0))
    for _ in range(2):
        for model, optimizer in ((first, first_optimizer), (second, second_optimizer)):
            with fabric.accumulate(model):
                fabric.backward(model(ONE).sum())
                optimizer.step()
                optimizer.zero_grad()
    assert (first_optimizer.applied, second_optimizer.applied) == (1, 1)
    assert (generator.weight.item(), critic.weight.item()) == (-1.0, -1.0)


def test_gradients_dropped_at_the_end_of_a_window_cause_no_update() -> None:
    fabric, model, optimizer = line(accumulate=2)
    for number in range(4):
        with fabric.accumulate(model):
            fabric.backward(model(ONE).sum())
            if number > 1:
                optimizer.step()
            optimizer.zero_grad()
    assert model.weight.item() == -1.0


def test_several_losses_of_a_micro_batch_share_its_weight() -> None:
    fabric, model, optimizer = line()
    with fabric.accumulate(model):
        for _ in range(2):
            fabric.backward(model(ONE).sum(), weight=5)
        optimizer.step()
    assert model.weight.item() == -2.0
    with fabric.accumulate(model):
        fabric.backward(model(ONE).sum(), weight=5)
        with refuses(ConfigurationError, "5 and 6"):
            fabric.backward(model(ONE).sum(), weight=6)


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_an_invalid_weight_is_refused(weight: float) -> None:
    fabric, model, _ = line()
    with fabric.accumulate(model), refuses(ConfigurationError, "weight="):
        fabric.backward(model(ONE).sum(), weight=weight)


# ---- clipping and the loss scale -------------------------------------------------------------------------------------


def test_clipping_by_value_and_norm() -> None:
    fabric, model, optimizer = line()
    # Without gradients it does nothing.
    assert fabric.clip_gradients(model, optimizer, clip_val=0.1) is None
    assert fabric.clip_gradients(model, optimizer, max_norm=0.1) == 0.0
    assert all(each.grad is None for each in model.parameters())
    fabric.backward(3 * model(ONE).sum())
    norm = fabric.clip_gradients(model, optimizer, max_norm=2.0)
    assert norm is not None
    assert norm.item() == 3.0
    assert model.weight.grad.item() == pytest.approx(2.0)
    assert fabric.clip_gradients(model, optimizer, clip_val=0.5) is None
    assert model.weight.grad.item() == 0.5
    fabric.clip_grad_value_(model.parameters(), 0.25)
    assert model.weight.grad.item() == 0.25
    with refuses(ConfigurationError, "clip_val=None", "max_norm=None"):
        fabric.clip_gradients(model, optimizer)
    model.weight.grad.fill_(float("inf"))
    with refuses(NonFiniteError, "inf"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)


def test_a_closure_runs_in_every_micro_batch() -> None:
    fabric, model, optimizer = line(accumulate=2)
    results = []
    for value in (1.0, 3.0):

        def closure(value: float = value) -> Tensor:
            loss: Tensor = model(torch.full((1, 1), value)).sum()
            fabric.backward(loss)
            return loss

        with fabric.accumulate(model):
            results.append(optimizer.step(closure))
    assert all(isinstance(result, Tensor) for result in results)
    assert model.weight.item() == -2.0


def test_fp16_scales_the_loss_once_and_unscales_once() -> None:
    fabric, model, optimizer = line(lr=0.25, precision="16-mixed", accumulate=3)
    assert fabric.scaler is not None
    fabric.scaler.scale = 256.0
    for _ in range(3):
        with fabric.accumulate(model):
            output = model(ONE)
            assert output.dtype is torch.float32
            fabric.backward(2 * output.sum(), weight=3)
            if fabric.sync_gradients:
                assert model.weight.grad.item() == 2 * 3 * 3 * fabric.scaler.scale
                fabric.unscale_gradients(optimizer)
                assert model.weight.grad.item() == pytest.approx(2.0)
            norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
    assert norm is not None
    assert norm.item() == pytest.approx(2.0)
    assert model.weight.item() == pytest.approx(-0.25)


def test_a_change_of_the_scale_reaches_gradients_that_wait_for_another_optimizer() -> None:
    fabric = Fabric(accelerator="cpu", precision="16-mixed")
    assert fabric.scaler is not None
    fabric.scaler.scale, fabric.scaler.growth_interval = 256.0, 1
    originals = line_model(), line_model()
    models, optimizers = zip(
        *(fabric.setup(each, torch.optim.SGD(each.parameters(), lr=1.0)) for each in originals), strict=True
    )
    for _ in range(2):
        fabric.backward(sum(model(ONE).sum() for model in models))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [each.weight.item() for each in originals] == [-2.0, -2.0]
    assert fabric.scaler.scale == 256.0 * 2**4


@pytest.mark.parametrize("clipping", [{}, {"clip_val": 0.1}, {"max_norm": 0.1}])
def test_an_update_with_overflow_is_none_for_weights_and_schedule(clipping: dict[str, Any]) -> None:
    fabric, model, optimizer = line(precision="16-mixed")
    assert fabric.scaler is not None
    scheduler = fabric.setup_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    scale = fabric.scaler.scale
    for loss_factor in (float("inf"), 1.0):
        with fabric.accumulate(model):
            fabric.backward(model(ONE).sum() * loss_factor)
            if clipping:
                fabric.clip_gradients(model, optimizer, **clipping)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if loss_factor != 1.0:
            assert (optimizer.applied, optimizer.step_was_skipped, model.weight.item()) == (0, True, 0.0)
            assert fabric.scaler.scale == scale / 2
            assert scheduler.get_last_lr() == [1.0]
    assert (optimizer.applied, optimizer.step_was_skipped) == (1, False)
    assert model.weight.item() == pytest.approx(-0.1 if clipping else -1.0, rel=1e-4)
    assert scheduler.get_last_lr() == [0.5]


def test_large_weights_stay_within_the_range_of_fp16() -> None:
    fabric, model, optimizer = line(lr=0.0, precision="16-mixed")
    skipped = []
    for _ in range(20):
        with fabric.accumulate(model):
            fabric.backward(model(ONE).sum() / 4, weight=5000)
            optimizer.step()
            optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    # Until the first window is through, its mean weight is not known.
    assert not any(skipped[skipped.index(False) :])


def test_a_scheduler_may_go_by_the_loop_instead_of_by_updates() -> None:
    fabric, _, optimizer = line(accumulate=4)
    plain = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scheduler = fabric.setup_schedulers(plain, step_scheduler_with_optimizer=False)
    optimizer.step()
    for _ in range(2):
        scheduler.step()
    assert scheduler.get_last_lr() == [0.25]


def unsynchronized() -> list[tuple[float, float]]:
    fabric, model, _ = line(devices="auto", strategy="ddp", accumulate=2)
    found = []

    def gradient() -> float:
        model.weight.grad = None
        fabric.backward(model(torch.full((1, 1), float(fabric.global_rank))).sum())
        value: float = model.weight.grad.item()
        return value

    with fabric.no_backward_sync(model):
        for _ in range(2):
            with fabric.accumulate(model):
                inside = gradient()
            found.append((inside, gradient()))
    with fabric.accumulate(model), fabric.no_backward_sync(model, enabled=False):
        found.append((gradient(), 0.0))
    with fabric.accumulate(model):
        with fabric.no_backward_sync(model):
            inside = gradient()
        found.append((inside, gradient()))
    with model.no_sync():
        inside = gradient()
    return [*found, (inside, gradient())]


def test_no_backward_sync_holds_inside_accumulate_and_ends_with_its_block() -> None:
    for rank, found in enumerate(run_on_ranks(2, unsynchronized)):
        own, mean = float(rank), 0.5
        assert found == [(own, own), (own, own), (own, 0.0), (own, mean), (own, mean)]


def test_the_number_of_micro_batches_may_change_between_updates() -> None:
    fabric, model, optimizer = line(lr=0.1, accumulate=4)
    ends: list[Any] = []
    for step in range(8):
        if step == 4:
            fabric.set_accumulation(2)
        with fabric.accumulate(model):
            assert fabric.is_accumulating
            fabric.backward(model(ONE).sum())
            optimizer.step()
        assert not fabric.is_accumulating
        ends.append(fabric.sync_gradients)
    assert ends == [False, False, False, True, False, True, False, True]
    assert (fabric.gradient_accumulation_steps, optimizer.applied) == (2, 3)
    with refuses(ConfigurationError, "accumulate_grad_batches=0"):
        fabric.set_accumulation(0)


def test_a_no_sync_of_the_module_itself_is_kept() -> None:
    class Own(nn.Linear):
        def no_sync(self) -> str:
            return "own"

    assert Fabric(accelerator="cpu").setup(Own(1, 1)).no_sync() == "own"
