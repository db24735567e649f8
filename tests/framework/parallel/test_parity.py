"""Weights of tokens, and every precision: any number of ranks train what one process of plain torch trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import Regressor, loader, plain_steps, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule

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


def language_model(ranks: int, batch_size: int, window: int, count: int) -> Tensor:
    module = TinyLM()
    data = DataLoader(TensorDataset(*padded_texts(count)), batch_size=batch_size)
    trainer = silent_trainer(devices=ranks, max_epochs=1, accumulate_grad_batches=window)
    trainer.fit(module, data)
    return weights_of(module)


@pytest.mark.parametrize(
    ("ranks", "batch_size", "window", "count"),
    [
        *((1, batch_size, window, 24) for batch_size, window in [(24, 1), (4, 6), (2, 12), (5, 5)]),
        *((ranks, *each, 24) for ranks in (2, 3) for each in [(4, 3), (2, 6), (5, 3), (1, 12)]),
        # A window of 16 texts, then a short one of 8, and ranks without any data.
        (1, 4, 4, 24),
        (2, 4, 2, 24),
        *((3, 2, 1, count) for count in (1, 2, 5)),
    ],
)
def test_token_weights_give_the_update_of_full_batches(ranks: int, batch_size: int, window: int, count: int) -> None:
    module = TinyLM()
    tokens, labels = padded_texts(count)
    size = ranks * batch_size * window
    batches = [slice(start, start + size) for start in range(0, count, size)]
    plain_steps(module.configure_optimizers(), lambda part: module.loss(tokens[part], labels[part]), batches)
    results = run_on_ranks(ranks, language_model, ranks, batch_size, window, count)
    for weights in results:
        torch.testing.assert_close(weights, weights_of(module), rtol=1e-5, atol=1e-6)
        assert torch.equal(weights, results[0])


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
