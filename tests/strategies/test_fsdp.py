"""``fsdp`` trains what one process trains, and hands the model back as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from models import Regressor, loader, network, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import AccumulationSchedule
from phalanx.strategies import FSDPStrategy

STEPS = 20
GLOBAL_BATCH = 12


def by_hand(windows: Sequence[int], clip: float | None, steps: int = STEPS) -> tuple[list[float], Tensor]:
    """Train on global batches of 12 times the window, in plain torch; return each update's loss and the weights."""
    x, y = regression_data(960).tensors
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses, position = [], 0
    for step in range(steps):
        count = GLOBAL_BATCH * windows[step % len(windows)]
        loss = nn.functional.mse_loss(net(x[position : position + count]), y[position : position + count])
        position += count
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, weights_of(net)


def per_update(ranks: list[list[float]], windows: list[int]) -> Tensor:
    """Return the mean loss of each update from the losses of each rank's micro-batches."""
    rows = torch.tensor(ranks, dtype=torch.float64).mean(0)
    return torch.stack([part.mean() for part in rows.split([windows[step % len(windows)] for step in range(STEPS)])])


def trained(ranks: int, strategy: Any, windows: list[int], clip: float | None) -> tuple[list[float], Tensor]:
    """Train through the Trainer; return the losses of this rank's micro-batches and the weights."""
    module = Regressor()
    schedule = AccumulationSchedule.cycle(windows) if len(windows) > 1 else windows[0]
    trainer = silent_trainer(
        strategy=strategy, devices=ranks, max_steps=STEPS, accumulate_grad_batches=schedule, gradient_clip_val=clip
    )
    trainer.fit(module, loader(960, GLOBAL_BATCH // ranks))
    assert trainer.global_step == STEPS
    assert type(module) is Regressor
    return module.losses, weights_of(module)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("windows", [[1], [4], [1, 2, 3, 1, 4, 2]], ids=["1", "4", "schedule"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_losses_and_weights_equal_plain_torch(ranks: int, windows: list[int], clip: float | None) -> None:
    strategy = FSDPStrategy(gather_weights="all")
    results = run_on_ranks(ranks, trained, ranks, strategy, windows, clip)
    losses, weights = by_hand(windows, clip)
    torch.testing.assert_close(
        per_update([each for each, _ in results], windows).float(), torch.tensor(losses), rtol=1e-5, atol=0
    )
    for _, own in results:
        torch.testing.assert_close(own, weights, rtol=1e-5, atol=1e-6)
