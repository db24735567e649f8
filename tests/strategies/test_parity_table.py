"""Every strategy trains the model of plain torch; the whole table is ``make parity``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_model import LENGTH, VOCABULARY, LanguageModel, tokens
from models import plain_steps, silent_trainer, weights_of, windows_of
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


def texts() -> tuple[Tensor, Tensor]:
    rows = tokens(TEXTS, seed=9)
    lengths = torch.randint(2, LENGTH + 1, (TEXTS, 1), generator=torch.Generator().manual_seed(1))
    assert int(rows.max()) < VOCABULARY
    return rows, rows.masked_fill(torch.arange(LENGTH) >= lengths, PADDING)


def token_weighted(strategy: str, nvme_path: str) -> Tensor | None:
    """Train an epoch of two updates in windows of uneven micro-batches; return the weights that rank 0 has after."""
    ranks, parts = STRATEGIES[strategy]
    module = Padded()
    trainer = silent_trainer(
        strategy=strategy_named(strategy, nvme_path), devices=ranks, max_epochs=1, accumulate_grad_batches=3
    )
    trainer.fit(module, DataLoader(TensorDataset(*texts()), batch_size=4 // parts))
    return weights_of(module) if trainer.is_global_zero else None


def full_batches() -> Tensor:
    """Train the same two updates by hand, each on one batch of all its texts."""
    module = Padded()
    rows, labels = texts()
    parts = windows_of(12, [1], 2)
    plain_steps(module.configure_optimizers(), lambda part: module.token_loss(rows[part], labels[part]), parts)
    return weights_of(module)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_token_weights_give_the_weights_of_the_full_batch(strategy: str, tmp_path: Any) -> None:
    if STRATEGIES[strategy][0] == 1:
        weights = token_weighted(strategy, str(tmp_path))
    else:
        weights = run_on_ranks(STRATEGIES[strategy][0], token_weighted, strategy, str(tmp_path))[0]
    assert weights is not None
    torch.testing.assert_close(weights, full_batches(), rtol=1e-4, atol=1e-6)
