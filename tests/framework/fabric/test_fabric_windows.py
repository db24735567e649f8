"""One loop with ``forward_backward`` trains the same under every strategy, pipelines included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_model import LanguageModel, tokens
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Fabric
from phalanx.strategies import PipelineStrategy

STEPS, ROWS, CLIP = 3, 8, 0.5
SCHEDULES = [("gpipe", 4), ("1f1b", 5), ("interleaved-1f1b", 4), ("zero-bubble", 4), ("zero-bubble-v", 5)]


def weight_of(step: int, number: int) -> float:
    """Return the weight of a micro-batch in the global order."""
    return 1.0 + (3 * step + 5 * number) % 4


def strategy_named(name: str) -> Any:
    return PipelineStrategy(name) if name in dict(SCHEDULES) else name


def trained(
    strategy: str, ranks: int, parallel: str | None, window: int, is_weighted: bool, blocks: int = 4
) -> tuple[Tensor, dict[str, Tensor]]:
    """Train some updates; return the losses that this rank was given, [steps, window], and on rank 0 the weights."""
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy_named(strategy), parallel=parallel)
    fabric.launch()
    module = LanguageModel(blocks=blocks)
    model, optimizer = fabric.setup(module, sgd(module))
    world, found = fabric.world, []

    def step(batch: Tensor) -> Tensor:
        return next_token_loss(model(batch), batch)

    for number, rows in enumerate(tokens(STEPS * ROWS).split(ROWS)):
        mine = list(enumerate(rows.chunk(window * world.data_size)))[world.data_rank :: world.data_size]
        weights = [weight_of(number, position) for position, _ in mine] if is_weighted else None
        found.append(fabric.forward_backward(step, [batch for _, batch in mine], weights))
        assert fabric.clip_gradients(model, optimizer, max_norm=CLIP) is not None
        optimizer.step()
        optimizer.zero_grad()
    weights_of_all = dict(fabric.full_state_dict(model))
    fabric.free_memory()
    return torch.stack(found), weights_of_all


def sgd(module: nn.Module) -> torch.optim.SGD:
    # Adam would blow up the rounding of gradients that are zero.
    return torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9)


def next_token_loss(logits: Tensor, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def by_hand(parts: int, is_weighted: bool, blocks: int = 4) -> tuple[Tensor, dict[str, Tensor]]:
    """Train the same in one process with plain torch; return the losses, [steps, parts], and the weights.

    Args:
        parts: the number of micro-batches in a global batch.
    """
    module = LanguageModel(blocks=blocks)
    optimizer, found = sgd(module), []
    for number, rows in enumerate(tokens(STEPS * ROWS).split(ROWS)):
        weights = torch.tensor([weight_of(number, position) if is_weighted else 1.0 for position in range(parts)])
        losses = torch.stack([module.loss(batch) for batch in rows.chunk(parts)])
        optimizer.zero_grad()
        ((losses * weights).sum() / weights.sum()).backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        found.append(losses.detach())
    return torch.stack(found), module.state_dict()


def check(
    strategy: str, ranks: int, parallel: str | None, shards: int, window: int, is_weighted: bool, blocks: int = 4
) -> None:
    results = run_on_ranks(ranks, trained, strategy, ranks, parallel, window, is_weighted, blocks, timeout=120.0)
    losses, weights = by_hand(shards * window, is_weighted, blocks)
    for rank, (found, _) in enumerate(results):
        wanted = losses[:, rank // (ranks // shards) :: shards]
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert results[0][1].keys() == weights.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(results[0][1][name], weight, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("strategy", "ranks", "parallel", "shards", "window"),
    [
        ("single", 1, None, 1, 4),
        ("ddp", 2, None, 2, 1),
        ("fsdp", 2, None, 2, 4),
        ("zero2", 2, None, 2, 4),
        ("fsdp", 2, "tp=2", 1, 4),
        ("pipeline", 2, "pp=2", 1, 4),
        ("pipeline", 4, "pp=2,dp_replicate=2", 2, 2),
        ("fsdp", 4, "pp=2,dp_shard=2", 2, 1),
        ("pipeline", 4, "pp=2,tp=2", 1, 4),
    ],
)
def test_one_loop_trains_as_one_process_under_every_strategy(
    strategy: str, ranks: int, parallel: str | None, shards: int, window: int
) -> None:
    check(strategy, ranks, parallel, shards, window, is_weighted=True)


@pytest.mark.parametrize(
    ("schedule", "blocks", "window"), [*((*each, 4) for each in SCHEDULES), ("1f1b", 5, 1), ("zero-bubble-v", 5, 1)]
)
def test_each_schedule_trains_as_one_process(schedule: str, blocks: int, window: int) -> None:
    check(schedule, 2, "pp=2", 1, window, is_weighted=False, blocks=blocks)
