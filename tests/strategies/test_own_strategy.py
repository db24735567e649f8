"""The strategy of docs/extending.md, registered by name: it trains what one process of plain torch trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import Regressor, loader, plain_steps, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor

import phalanx
from phalanx.framework.core.registry import STRATEGIES

STEPS, GLOBAL_BATCH = 6, 8
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


def trained(ranks: int, window: int, target: str) -> Tensor:
    if "flat-from-docs" not in STRATEGIES:
        STRATEGIES.register("flat-from-docs", target)
    module = Regressor(optimizer="sgd")
    trainer = silent_trainer(
        devices=ranks, strategy="flat-from-docs", max_epochs=1, accumulate_grad_batches=window, gradient_clip_val=0.5
    )
    trainer.fit(module, loader(STEPS * GLOBAL_BATCH, GLOBAL_BATCH // ranks // window))
    assert trainer.global_step == STEPS
    return weights_of(module)


@pytest.mark.parametrize(("ranks", "window"), [(1, 4), (2, 1), (2, 4)])
def test_the_strategy_of_the_page_trains_what_plain_torch_trains(ranks: int, window: int) -> None:
    module = Regressor(optimizer="sgd")
    batches = loader(STEPS * GLOBAL_BATCH, GLOBAL_BATCH)
    plain_steps(module.configure_optimizers(), lambda batch: module.training_step(batch, 0), batches, 0.5)
    for weights in run_on_ranks(ranks, trained, ranks, window, f"{__name__}:from_page"):
        torch.testing.assert_close(weights, weights_of(module), rtol=1e-5, atol=1e-6)
