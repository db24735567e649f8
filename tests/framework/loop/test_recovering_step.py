"""Micro-batches that are found: after a rank ran out of memory, training continues as with small ones before."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from exhausted import FSDP_RECOVERS, PLACES, Exhausted, strategy_of
from messages import refuses
from models import regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from phalanx import Callback
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.core.errors import ConfigurationError, LoopError
from phalanx.framework.loop.window_state import update_or_repeat


class Curve(Callback):
    """Notes the epoch's mean loss and number of rows, which are reduced over the ranks."""

    monitors = True

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.values += [float(trainer.callback_metrics[name]) for name in ("loss_epoch", "rows")]


Result = tuple[list[float], Tensor, int, int, int | None]


def made(*place: Any) -> Exhausted:
    torch.manual_seed(1)
    return Exhausted(*place)


def fitted(
    ranks: int, micro: int | str, *place: Any, workers: int = 0, strategy: str | None = None, **settings: Any
) -> Result:
    """Return the curve, the weights, the optimizer steps, the errors that were raised, and the size found."""
    module, curve = made(*place), Curve()
    trainer = silent_trainer(
        max_epochs=2,
        devices=ranks,
        strategy=strategy_of(strategy or ("ddp" if ranks > 1 else "single")),
        global_batch_size=16,
        micro_batch_size=micro,
        callbacks=curve,
        **settings,
    )
    # The last of three global batches has one sample, so that one rank has none.
    data = DataLoader(regression_data(33), batch_size=4, shuffle=True, num_workers=workers)
    trainer.fit(module, data)
    assert trainer.progress.global_batch == settings.get("max_steps", 6)
    assert trainer.throughput is None or trainer.throughput.count > 0
    return curve.values, weights_of(module), trainer.global_step, module.raised, trainer.micro_batch_size


def fitted_under(strategy: str, micro: int | str, *place: Any) -> Result:
    return fitted(2, micro, *place, strategy=strategy)


NEVER = ("forward", 99, 0)


@functools.cache
def never_exhausted(ranks: int, strategy: str, micro: int) -> list[Result]:
    """Return what each rank has of a fit with a given size, in which memory suffices."""
    return run_on_ranks(ranks, fitted_under, strategy, micro, *NEVER) if ranks > 1 else [fitted(1, micro, *NEVER)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("at", [0, 2])
def test_one_rank_continues_with_smaller_micro_batches(place: str, at: int) -> None:
    values, weights, steps, raised, size = fitted(1, "auto", place, 0, 5, at)

    ((expected, by_hand, expected_steps, _, _),) = never_exhausted(1, "single", 16)
    assert raised == (1 if place == "update" else 2)
    assert size == (8 if place == "update" else 4)
    assert steps == expected_steps
    assert values == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(weights, by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("strategy", "rank"),
    [("ddp", 1), pytest.param("fsdp", 1, marks=FSDP_RECOVERS), ("zero1", 0), ("zero2", 1)],
)
def test_all_ranks_agree_on_smaller_micro_batches(place: str, strategy: str, rank: int) -> None:
    results = run_on_ranks(2, fitted_under, strategy, "auto", place, rank, 3, 1)

    expected = never_exhausted(2, strategy, 8)
    for (values, weights, steps, raised, size), (curve, by_hand, expected_steps, _, _) in zip(
        results, expected, strict=True
    ):
        assert size == (4 if place == "update" else 2)
        assert steps == expected_steps
        assert values == pytest.approx(curve, rel=1e-6)
        torch.testing.assert_close(weights, by_hand, rtol=1e-5, atol=1e-6)
        assert raised in (0, 1, 2)
    assert [result[3] > 0 for result in results] == [rank == 0, rank == 1]


def in_bf16(strategy: str, micro: int | str, *place: Any) -> tuple[Tensor, Tensor]:
    """Return how the weights have changed, and the number of errors."""
    before = weights_of(made(*place))
    _, weights, _, raised, _ = fitted(2, micro, *place, strategy=strategy, precision="bf16-mixed", max_steps=4)
    return weights - before, torch.tensor(raised)


@pytest.mark.parametrize("strategy", ["zero1", "zero2"])
def test_gradients_of_a_lower_dtype_are_kept_and_reduced_once(strategy: str) -> None:
    (first, raised), (second, _) = run_on_ranks(2, in_bf16, strategy, "auto", "backward", 0, 3)

    (by_hand, _), _ = run_on_ranks(2, in_bf16, strategy, 2, *NEVER)
    assert raised == 2
    assert torch.equal(first, second)
    assert (first - by_hand).norm() < 0.05 * by_hand.norm()


# ---- nothing of a failed attempt remains --------------------------------------------------------------------------


class Augmented(Dataset[Any]):
    """Rows with noise from the global generator, as augmentation draws it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        x, y = regression_data(40)[index]
        return x + 0.1 * torch.randn(6), y


def random_fit(
    micro: int | str, place: str, root: Path, ckpt_path: str | None = None, steps: int = 6, workers: int = 0
) -> tuple[Exhausted, Tensor, Tensor]:
    """Train a model with dropout, batch norm and random data; return its weights and statistics."""
    torch.manual_seed(1)
    module = Exhausted(place, 0, 5, at=0 if micro == "auto" else 999, dropout=0.5, norm=True)
    saves = ModelCheckpoint(dirpath=root, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = silent_trainer(
        max_epochs=2, max_steps=steps, devices=1, global_batch_size=16, micro_batch_size=micro, callbacks=saves,
        enable_checkpointing=None,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=workers), ckpt_path=ckpt_path)
    mean = module.norm.running_mean
    assert isinstance(mean, Tensor)
    return module, weights_of(module), mean


@pytest.mark.parametrize("workers", [0, 2])
def test_random_numbers_and_buffers_are_those_of_small_micro_batches(workers: int, tmp_path: Path) -> None:
    _, by_hand, expected = random_fit(4, "forward", tmp_path / "given", workers=workers)

    for place in ("forward", "backward"):
        module, weights, mean = random_fit("auto", place, tmp_path / place, workers=workers)

        assert module.raised == 2
        assert torch.equal(weights, by_hand)
        assert torch.equal(mean, expected)


def test_a_resumed_fit_begins_with_the_size_that_was_found(tmp_path: Path) -> None:
    _, weights, mean = random_fit("auto", "forward", tmp_path / "whole")
    random_fit("auto", "forward", tmp_path, steps=2)

    module, resumed, resumed_mean = random_fit("auto", "forward", tmp_path / "resumed", str(tmp_path / "step=2.ckpt"))

    assert module.raised == 0
    assert torch.equal(weights, resumed)
    assert torch.equal(mean, resumed_mean)


# ---- what cannot be healed ----------------------------------------------------------------------------------------


def test_a_sample_that_does_not_fit_raises_the_error() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="injected") as raised:
        fitted(1, "auto", "forward", 0, 0)
    hints = " ".join(getattr(raised.value, "__notes__", []))
    assert "1 of 1 rank ran out of memory with micro-batches of one sample, the smallest: shorten the samples" in hints


def exhausted_for_good() -> str:
    try:
        fitted(2, "auto", "backward", 1, 0)
    except (LoopError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_all_ranks_end_where_a_sample_does_not_fit() -> None:
    first, second = run_on_ranks(2, exhausted_for_good)

    assert "1 of 2 ranks ran out of memory with micro-batches of one sample" in first
    assert "injected" in second


def test_other_errors_are_raised() -> None:
    class Broken(Exhausted):
        def raise_error(self, *_: Any) -> None:
            raise ValueError("broken")

    trainer = silent_trainer(max_epochs=1, devices=1, global_batch_size=16, micro_batch_size="auto")
    with pytest.raises(ValueError, match="broken"):
        trainer.fit(Broken("forward", 0, 5), DataLoader(regression_data(40), batch_size=4))


def test_a_strategy_with_collectives_in_passes_is_refused() -> None:
    trainer = silent_trainer(max_epochs=1, devices=1, strategy="zero3", global_batch_size=16, micro_batch_size="auto")

    with refuses(ConfigurationError, "strategy='ddp'", "'fsdp'", "'zero2'"):
        trainer.fit(Exhausted("forward", 0, 5), DataLoader(regression_data(40), batch_size=4))


class Halfway(torch.optim.SGD):
    """Runs out of memory once: after it has created state, or after it has also changed a weight."""

    def __init__(self, parameters: Any, changes: bool) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.param_groups[0]["steps"] = 0
        self.changes, self.fails = changes, True

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["steps"] += 1
        if self.fails:
            self.fails = False
            first = self.param_groups[0]["params"][0]
            self.state[first]["momentum_buffer"] = torch.full_like(first, 7.0)
            if self.changes:
                with torch.no_grad():
                    first.add_(1.0)
            raise torch.OutOfMemoryError("injected")
        return super().step(closure)


def layer_with_gradients() -> nn.Linear:
    layer = nn.Linear(3, 1)
    nn.init.ones_(layer.weight)
    layer(torch.ones(2, 3)).sum().backward()
    return layer


def applied(optimizer: torch.optim.Optimizer, notes: list[int]) -> bool:
    def step() -> bool:
        optimizer.step()
        return True

    return update_or_repeat(optimizer, step, lambda: notes.append(1))


def test_an_update_that_has_changed_nothing_is_repeated_exactly() -> None:
    layer, plain, notes = layer_with_gradients(), layer_with_gradients(), list[int]()
    torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9).step()

    optimizer = Halfway(layer.parameters(), changes=False)

    assert applied(optimizer, notes)

    assert optimizer.param_groups[0]["steps"] == 1
    assert torch.equal(layer.weight, plain.weight)
    assert notes == [1]


def test_an_update_that_has_changed_a_weight_raises() -> None:
    notes: list[int] = []

    with refuses(LoopError, "foreach=False"):
        applied(Halfway(layer_with_gradients().parameters(), changes=True), notes)

    assert not notes
