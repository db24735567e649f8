"""Training on any number of ranks is the training of one process, written by hand in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import Regressor, loader, network, plain_steps, regression_data, silent_trainer, weights_of, windows_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import AccumulationSchedule, TrainModule

STEPS = 20
GLOBAL_BATCH = 8


def by_hand(windows: Sequence[int], clip: float | None, steps: int = STEPS) -> tuple[list[float], Tensor]:
    """Train on global batches of 8 times the window, in plain torch; return each update's loss and the weights."""
    x, y = regression_data(640).tensors
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    batches = windows_of(GLOBAL_BATCH, windows, steps)
    losses = plain_steps(optimizer, lambda rows: nn.functional.mse_loss(net(x[rows]), y[rows]), batches, clip)
    return losses, weights_of(net)


def trained(ranks: int, strategy: str, windows: list[int], clip: float | None) -> tuple[list[float], Tensor]:
    """Train through the Trainer; return the losses of this rank's micro-batches and the weights."""
    module = Regressor()
    schedule = AccumulationSchedule.cycle(windows) if len(windows) > 1 else windows[0]
    trainer = silent_trainer(
        strategy=strategy, devices=ranks, max_steps=STEPS, accumulate_grad_batches=schedule, gradient_clip_val=clip
    )
    trainer.fit(module, loader(640, GLOBAL_BATCH // ranks))
    assert trainer.global_step == STEPS
    return module.losses, weights_of(module)


def per_update(ranks: list[list[float]], windows: list[int]) -> list[float]:
    """Return the mean loss of each update from the losses of each rank's micro-batches."""
    rows = torch.tensor(ranks, dtype=torch.float64).mean(0)
    sizes = [windows[step % len(windows)] for step in range(STEPS)]
    return [part.mean().item() for part in rows.split(sizes)]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("windows", [[1], [4], [1, 2, 3, 1, 4, 2]], ids=["1", "4", "schedule"])
@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, "single"), (1, "ddp"), (2, "ddp"), (2, "ddp_find_unused_parameters_true")]
)
def test_losses_and_weights_equal_plain_torch(
    ranks: int, strategy: str, windows: list[int], clip: float | None
) -> None:
    if ranks == 1:
        results = [trained(1, strategy, windows, clip)]
    else:
        results = run_on_ranks(ranks, trained, ranks, strategy, windows, clip)
    losses, weights = by_hand(windows, clip)
    torch.testing.assert_close(
        torch.tensor(per_update([r[0] for r in results], windows)), torch.tensor(losses), rtol=1e-5, atol=0
    )
    for _, own in results:
        torch.testing.assert_close(own, weights, rtol=1e-5, atol=1e-6)
        assert torch.equal(own, results[0][1])


# ---- Hugging Face's worked examples of gradient accumulation ---------------------------------------


class Doubler(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.net.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.02)


def doubled(ranks: int, batch_size: int, window: int) -> float:
    x = torch.arange(1.0, 9.0).reshape(8, 1)
    module = Doubler()
    data = DataLoader(TensorDataset(x, 2 * x), batch_size=batch_size)
    silent_trainer(devices=ranks, max_steps=1, accumulate_grad_batches=window).fit(module, data)
    return module.net.weight.item()


def test_four_micro_batches_of_two_are_one_batch_of_eight() -> None:
    assert doubled(1, 2, 4) == pytest.approx(2.04, abs=1e-6)
    assert doubled(1, 8, 1) == pytest.approx(2.04, abs=1e-6)
    assert run_on_ranks(2, doubled, 2, 2, 2) == pytest.approx([2.04, 2.04], abs=1e-6)


VOCABULARY, PADDING = 11, -100


class TinyLM(TrainModule):
    """A causal language model whose loss is the mean over the tokens that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.net = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.net(tokens[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=PADDING)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(*batch)

    def batch_weight(self, batch: Any) -> Tensor:
        tokens: Tensor = (batch[1][:, 1:] != PADDING).sum()
        return tokens

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def padded_texts(count: int = 24) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(9)
    tokens = torch.randint(0, VOCABULARY, (count, 10), generator=generator)
    lengths = torch.randint(2, 11, (count, 1), generator=generator)
    return tokens, tokens.masked_fill(torch.arange(10) >= lengths, PADDING)


def language_model(ranks: int, batch_size: int, window: int, count: int = 24) -> Tensor:
    module = TinyLM()
    data = DataLoader(TensorDataset(*padded_texts(count)), batch_size=batch_size)
    trainer = silent_trainer(devices=ranks, max_epochs=1, accumulate_grad_batches=window)
    trainer.fit(module, data)
    return weights_of(module)


def language_model_by_hand(batches: list[slice], count: int = 24) -> Tensor:
    module = TinyLM()
    tokens, labels = padded_texts(count)
    plain_steps(module.configure_optimizers(), lambda part: module.loss(tokens[part], labels[part]), batches)
    return weights_of(module)


@pytest.mark.parametrize(("batch_size", "window"), [(24, 1), (4, 6), (2, 12), (5, 5)])
def test_token_weights_give_the_full_batch_on_one_rank(batch_size: int, window: int) -> None:
    expected = language_model_by_hand([slice(0, 24)])
    torch.testing.assert_close(language_model(1, batch_size, window), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("batch_size", "window"), [(4, 3), (2, 6), (5, 3), (1, 12)])
def test_token_weights_give_the_full_batch_on_several_ranks(ranks: int, batch_size: int, window: int) -> None:
    expected = language_model_by_hand([slice(0, 24)])
    for weights in run_on_ranks(ranks, language_model, ranks, batch_size, window):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_short_last_window_is_stepped_on_with_its_true_weight() -> None:
    # 24 texts in windows of 4 batches of 4: one of 16, then one of 8.
    expected = language_model_by_hand([slice(0, 16), slice(16, 24)])
    torch.testing.assert_close(language_model(1, 4, 4), expected, rtol=1e-5, atol=1e-6)
    for weights in run_on_ranks(2, language_model, 2, 4, 2):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_ranks_without_data_contribute_weight_zero(count: int) -> None:
    expected = language_model_by_hand([slice(0, count)], count)
    for weights in run_on_ranks(3, language_model, 3, 2, 1, count):
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


# ---- precision ---------------------------------------


def in_precision(ranks: int, precision: str) -> tuple[Tensor, torch.dtype]:
    module = Regressor(lr=0.01, optimizer="sgd")
    trainer = silent_trainer(devices=ranks, max_steps=10, precision=precision)
    if trainer.fabric.scaler is not None:
        # The usual start overflows at once, and an update that is skipped is not one of the ten.
        trainer.fabric.scaler.scale = 256.0
    trainer.fit(module, loader(160, 8 // ranks))
    return weights_of(module), module.dtype


@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"),
    [
        ("64-true", torch.float64, 1e-6),
        ("bf16-mixed", torch.float32, 2e-2),
        ("16-mixed", torch.float32, 5e-3),
        ("bf16-true", torch.bfloat16, 5e-2),
        ("16-true", torch.float16, 1e-2),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_precision_trains_the_same_model(
    ranks: int, precision: str, dtype: torch.dtype, tolerance: float
) -> None:
    expected, _ = in_precision(1, "32-true")
    results = [in_precision(1, precision)] if ranks == 1 else run_on_ranks(2, in_precision, 2, precision)
    for weights, found in results:
        assert found == dtype
        assert not torch.equal(weights, expected)
        torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance)
