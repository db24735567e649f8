"""Context parallelism: ranks that share sequences train, log and evaluate what one process does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from long_sequences import LongModel, by_hand, loader
from models import silent_trainer
from ranks import run_on_ranks

STEPS, BATCH = 4, 8


def trained(strategy: Any, ranks: int, window: int, parallel: dict[str, int]) -> tuple[dict[str, float], Any]:
    module = LongModel()
    trainer = silent_trainer(
        strategy=strategy,
        devices=ranks,
        parallel=parallel,
        max_steps=STEPS,
        accumulate_grad_batches=window,
        gradient_clip_val=0.3,
        limit_train_batches=STEPS * window,
        num_sanity_val_steps=0,
        verbose=False,
    )
    size = BATCH // trainer.fabric.resources.data_size // window
    trainer.fit(module, loader(size), loader(3, 7))
    held = all(parameter.device.type == "cpu" for parameter in module.parameters())
    weights = {name: each.detach() for name, each in module.named_parameters()} if held else {}
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, weights


MESHES = [
    ("ddp", 2, 1, {"cp": 2}),
    ("ddp", 2, 4, {"cp": 2}),
    ("fsdp", 2, 2, {"cp": 2}),
    ("ddp", 4, 2, {"cp": 2}),
    ("fsdp", 4, 1, {"cp": 2, "dp_shard": 2}),
    ("fsdp", 4, 2, {"cp": 2, "tp": 2}),
    ("ddp", 4, 1, {"cp": 2, "tp": 2}),
]


@pytest.mark.parametrize(("strategy", "ranks", "window", "parallel"), MESHES)
def test_weights_and_metrics_are_those_of_one_process(
    strategy: str, ranks: int, window: int, parallel: dict[str, int]
) -> None:
    losses, expected = by_hand(1, 0.3, STEPS, BATCH)
    single, _ = trained("single", 1, 1, {})
    for metrics, weights in run_on_ranks(ranks, trained, strategy, ranks, window, parallel):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected.get_parameter(name).detach(), rtol=1e-4, atol=2e-6)
        assert metrics["val_loss"] == pytest.approx(single["val_loss"], rel=1e-5)
        assert metrics["tokens"] == single["tokens"]
        if window == 1 and parallel["cp"] == ranks:
            assert metrics["train_loss"] == pytest.approx(sum(losses) / STEPS, rel=1e-5)
