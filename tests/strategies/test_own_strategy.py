"""The strategy of docs/extending.md, registered by name: it trains what one process of plain torch trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

import phalanx
from phalanx import TrainModule
from phalanx.framework.core.registry import STRATEGIES

STEPS, GLOBAL_BATCH, LR = 6, 8, 0.1
PAGE = Path(phalanx.__file__).parent / "docs" / "extending.md"


def code_of_page() -> str:
    """Return the block of the page that defines the strategy."""
    blocks = PAGE.read_text(encoding="utf-8").split("```python\n")
    (block,) = [block.split("```")[0] for block in blocks if "class FlatAllReduce" in block]
    return block


def from_page() -> Any:
    names: dict[str, Any] = {}
    exec(compile(code_of_page(), str(PAGE), "exec", dont_inherit=True), names)
    return names["FlatAllReduce"]()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def rows() -> Tensor:
    return torch.randn(STEPS * GLOBAL_BATCH, 7, generator=torch.Generator().manual_seed(0))


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.mse_loss(net(batch[:, :6]), batch[:, 6:])


class Model(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def trained(ranks: int, window: int, target: str) -> list[Tensor]:
    if "flat-from-docs" not in STRATEGIES:
        STRATEGIES.register("flat-from-docs", target)
    module = Model()
    trainer = silent_trainer(
        devices=ranks, strategy="flat-from-docs", max_epochs=1, accumulate_grad_batches=window, gradient_clip_val=0.5
    )
    size = GLOBAL_BATCH // ranks // window
    trainer.fit(module, DataLoader(rows(), batch_size=size))  # type: ignore[arg-type]
    assert trainer.global_step == STEPS
    return [parameter.detach() for parameter in module.net.parameters()]


def by_torch() -> list[Tensor]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for batch in rows().split(GLOBAL_BATCH):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_strategy_of_the_page_trains_what_plain_torch_trains(ranks: int, window: int) -> None:
    for weights in run_on_ranks(ranks, trained, ranks, window, f"{__name__}:from_page"):
        for weight, expected in zip(weights, by_torch(), strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


def test_the_page_shows_a_strategy_in_under_60_lines() -> None:
    assert len(code_of_page().splitlines()) < 60
