"""Parameters that a rank, or a micro-batch, or no rank at all uses: as hand-written torch on the global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule

WIDTH, EPOCHS, CLIP = 4, 2, 0.3
SAMPLES = 41
"""The last global micro-batch of two ranks has one sample, so that one of them has none."""


class Branches(TrainModule):
    """Two branches, of which a micro-batch uses one or both, and a layer that none uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 6)
        self.end_of_first, self.end_of_second = nn.Linear(4, 1), nn.Linear(6, 1)
        self.unused = nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, branch = batch
        first, second = self.end_of_first(self.first(x).tanh()), self.end_of_second(self.second(x).tanh())
        outputs: Tensor = (first, second, first - second.sum())[int(branch[0])]
        return outputs.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Weight decay shows an update with a gradient of zero; clipping shows a norm that ranks do not agree on.
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.5)


def samples() -> tuple[Tensor, Tensor]:
    x = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(SAMPLES) // 4 % 3


def fitted(strategy: str, precision: str, accumulate: int) -> Tensor | None:
    """Return the weights on rank 0."""
    module = Branches()
    trainer = silent_trainer(
        max_epochs=EPOCHS,
        devices=2,
        strategy=strategy,
        precision=precision,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=CLIP,
    )
    trainer.fit(module, DataLoader(TensorDataset(*samples()), batch_size=4))
    return weights_of(module) if trainer.is_global_zero else None


def by_hand(precision: str, accumulate: int) -> Tensor:
    module, (x, branch) = Branches(), samples()
    optimizer = module.configure_optimizers()
    for _ in range(EPOCHS):
        for start in range(0, SAMPLES, 8 * accumulate):
            end = min(start + 8 * accumulate, SAMPLES)
            places = range(start, end, 4)
            optimizer.zero_grad()
            for place in places:
                part = slice(place, min(place + 4, end))
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                    loss = module.training_step((x[part], branch[part]), 0)
                (loss / len(places)).backward()
            nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
    return weights_of(module)


@pytest.mark.parametrize(
    ("strategy", "precision", "accumulate"),
    [
        ("ddp_find_unused_parameters_true", "32-true", 1),
        ("ddp_find_unused_parameters_true", "bf16-mixed", 2),
        ("fsdp", "32-true", 1),
        ("fsdp", "bf16-mixed", 2),
        ("zero1", "32-true", 1),
        ("zero1", "bf16-mixed", 2),
        ("zero2", "32-true", 1),
        ("zero2", "bf16-mixed", 2),
    ],
)
def test_ranks_use_different_parameters(strategy: str, precision: str, accumulate: int) -> None:
    found, _ = run_on_ranks(2, fitted, strategy, precision, accumulate)

    torch.testing.assert_close(
        found, by_hand(precision, accumulate), rtol=0, atol=1e-5 if precision == "32-true" else 2e-3
    )
