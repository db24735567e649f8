"""Context parallelism with activations that are computed again in backward: attention covers full sequences there."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from long_sequences import LongModel, by_hand, loader
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

STEPS, BATCH, BLOCKS = 3, 8, 4


def recomputed(strategy: str, ranks: int, parallel: dict[str, int], way: str) -> dict[str, Tensor]:
    module = LongModel(blocks=BLOCKS)
    for block in module.blocks if way != "blocks" else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=way == "reentrant")
    trainer = silent_trainer(
        strategy=strategy,
        devices=ranks,
        parallel=parallel,
        max_steps=STEPS,
        memory="blocks" if way == "blocks" else None,
    )
    trainer.fit(module, loader(BATCH))
    return {name: each.detach() for name, each in module.named_parameters() if not each.is_meta}


@pytest.mark.parametrize(
    ("strategy", "ranks", "parallel", "way"),
    [
        ("ddp", 2, {"cp": 2}, "reentrant"),
        ("fsdp", 2, {"cp": 2}, "blocks"),
        ("fsdp", 2, {"cp": 2}, "not reentrant"),
        ("pipeline", 4, {"pp": 2, "cp": 2}, "blocks"),
    ],
)
def test_activations_that_are_computed_again_attend_to_full_sequences(
    strategy: str, ranks: int, parallel: dict[str, int], way: str
) -> None:
    _, expected = by_hand(1, None, STEPS, BATCH, blocks=BLOCKS)
    for weights in run_on_ranks(ranks, recomputed, strategy, ranks, parallel, way):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected.get_parameter(name).detach(), rtol=1e-4, atol=2e-6, msg=name)
