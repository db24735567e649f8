"""Every strategy trains the model of plain torch; the whole table is ``make parity``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_model import LENGTH, VOCABULARY, LanguageModel, tokens
from models import Regressor, full_weights, loader, plain_steps, silent_trainer, weights_of
from parity_table import PRECISIONS, STRATEGIES, Cell, deviation, strategy_named
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx.framework.core.registry import STRATEGIES as REGISTERED

SCHEDULE = "1,2,3,1,4,2"
# Each window of the schedule once, and two updates after the last change.
STEPS = 8


def test_the_table_has_every_strategy() -> None:
    # `deepspeed` is zero2, and zero1-offload steps as zero2-offload does. test_pipeline.py compares pipelines.
    variants = {"auto", "ddp_find_unused_parameters_true", "deepspeed", "zero1-offload", "pipeline"}
    assert set(REGISTERED) - variants <= set(STRATEGIES)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_and_clipping_together(strategy: str) -> None:
    assert deviation(Cell(strategy, "32-true", SCHEDULE, clips=True, steps=STEPS)) <= PRECISIONS["32-true"]


# One of each way of keeping weights beside their copies in bf16; the others differ in where state lies.
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero2", "zero3"])
def test_bf16(strategy: str) -> None:
    assert deviation(Cell(strategy, "bf16-mixed", SCHEDULE, clips=True, steps=5)) <= PRECISIONS["bf16-mixed"]


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
def test_every_precision_trains_the_same_model(precision: str, dtype: torch.dtype, tolerance: float) -> None:
    expected, _ = in_precision(1, "32-true")
    for weights, found in run_on_ranks(2, in_precision, 2, precision):
        assert found == dtype
        assert not torch.equal(weights, expected)
        torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance)


# ---- Hugging Face's worked example: means over tokens, uneven micro-batches ------------------------

PADDING = -100
TEXTS = 24


class Padded(LanguageModel):
    """Its loss is the mean over the tokens that are no padding."""

    def token_loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of rows [batch, length]."""
        logits = self(rows)[:, :-1].flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=PADDING)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.token_loss(*batch)

    def batch_weight(self, batch: Any) -> Tensor:
        weight: Tensor = (batch[1][:, 1:] != PADDING).sum()
        return weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def texts(count: int = TEXTS) -> tuple[Tensor, Tensor]:
    rows = tokens(TEXTS, seed=9)
    lengths = torch.randint(2, LENGTH + 1, (TEXTS, 1), generator=torch.Generator().manual_seed(1))
    assert int(rows.max()) < VOCABULARY
    return rows[:count], rows.masked_fill(torch.arange(LENGTH) >= lengths, PADDING)[:count]


def token_weighted(
    strategy: str, ranks: int, batch_size: int, window: int, count: int, nvme_path: str = ""
) -> Tensor | None:
    """Train an epoch in windows of uneven micro-batches; return the weights, under some strategies on rank 0 alone."""
    module = Padded()
    trainer = silent_trainer(
        strategy=strategy_named(strategy, nvme_path), devices=ranks, max_epochs=1, accumulate_grad_batches=window
    )
    trainer.fit(module, DataLoader(TensorDataset(*texts(count)), batch_size=batch_size))
    return full_weights(module)


def full_batches(size: int, count: int = TEXTS) -> Tensor:
    """Train the same updates by hand, each on one batch of all its texts."""
    module = Padded()
    rows, labels = texts(count)
    parts = [slice(start, start + size) for start in range(0, count, size)]
    plain_steps(module.configure_optimizers(), lambda part: module.token_loss(rows[part], labels[part]), parts)
    return weights_of(module)


# One of each way of averaging gradients; test_meshes.py has the other degrees.
@pytest.mark.parametrize("strategy", ["hsdp", "zero2", "zero3", "zero3-offload", "fsdp+tp"])
def test_token_weights_give_the_weights_of_the_full_batch(strategy: str, tmp_path: Any) -> None:
    ranks, parts = STRATEGIES[strategy]
    weights = run_on_ranks(ranks, token_weighted, strategy, ranks, 4 // parts, 3, TEXTS, str(tmp_path))[0]
    assert weights is not None
    torch.testing.assert_close(weights, full_batches(12), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "batch_size", "window", "count"),
    [
        (1, 4, 6, TEXTS),
        (1, 5, 5, TEXTS),
        (2, 1, 12, TEXTS),
        (2, 5, 3, TEXTS),
        (3, 5, 3, TEXTS),
        # A window of 16 texts, then a short one of 8, and ranks without any data.
        (1, 4, 4, TEXTS),
        (2, 4, 2, TEXTS),
        *((3, 2, 1, count) for count in (1, 5)),
    ],
)
def test_token_weights_of_windows_of_any_size(ranks: int, batch_size: int, window: int, count: int) -> None:
    strategy = "ddp" if ranks > 1 else "single"
    results = run_on_ranks(ranks, token_weighted, strategy, ranks, batch_size, window, count)
    for weights in results:
        torch.testing.assert_close(weights, full_batches(ranks * batch_size * window, count), rtol=1e-5, atol=1e-6)
        assert torch.equal(weights, results[0])
