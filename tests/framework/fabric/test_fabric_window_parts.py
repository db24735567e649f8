"""``forward_backward`` where ranks share the sequences of their micro-batches, in pipelines too."""

from __future__ import annotations

import pytest
import torch
from long_sequences import IGNORED, LongModel, by_hand, rows
from ranks import run_on_ranks
from torch import Tensor

from phalanx import Fabric

STEPS, WINDOW, CLIP, BLOCKS, SIZE = 4, 2, 0.5, 4, 2


def trained(strategy: str, ranks: int, parallel: str) -> tuple[list[list[tuple[float, float]]], dict[str, Tensor]]:
    """Return the loss of each micro-batch with its number of targets, for each step, and on rank 0 the weights."""
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy, parallel=parallel)
    fabric.launch()
    module = LongModel(blocks=BLOCKS)
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    model.mark_forward_method("loss")
    given, found, world = rows(), [], fabric.world
    count = WINDOW * SIZE
    for number in range(STEPS):
        chosen = given[number * count : (number + 1) * count]
        batches = []
        for start in range(0, count, SIZE):
            tokens, targets = (torch.stack(each) for each in zip(*chosen[start : start + SIZE], strict=True))
            batches.append((fabric.part(tokens), fabric.part(targets), fabric.part.positions(tokens)))
        batches = batches[world.data_rank :: world.data_size]
        weights = [int((targets != IGNORED).sum()) for _, targets, _ in batches]
        losses = fabric.forward_backward(model.loss, batches, weights)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        pairs = zip(losses.tolist(), weights, strict=True)
        found.append([(loss if weight else 0.0, float(weight)) for loss, weight in pairs] if world.counts_data else [])
    weights_of_all = dict(fabric.full_state_dict(model))
    fabric.free_memory()
    return found, weights_of_all


@pytest.mark.parametrize(
    ("strategy", "ranks", "parallel"),
    [
        ("ddp", 2, "cp=2"),
        ("fsdp", 2, "cp=2"),
        ("pipeline", 4, "pp=2,cp=2"),
        ("fsdp", 4, "pp=2,cp=2"),
    ],
)
def test_parts_train_as_full_sequences(strategy: str, ranks: int, parallel: str) -> None:
    results = run_on_ranks(ranks, trained, strategy, ranks, parallel, timeout=120.0)
    expected, module = by_hand(WINDOW, CLIP, STEPS, SIZE, blocks=BLOCKS)
    for step, loss in enumerate(expected):
        pairs = [pair for found, _ in results for pair in found[step]]
        assert sum(loss * count for loss, count in pairs) / sum(count for _, count in pairs) == pytest.approx(
            loss, rel=1e-6
        )
    for name, weight in module.state_dict().items():
        torch.testing.assert_close(results[0][1][name], weight, rtol=1e-5, atol=1e-5, msg=name)
