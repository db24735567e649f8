"""Evaluation in a user's own loop: all ranks evaluate the same model."""

from __future__ import annotations

import torch
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from phalanx import Fabric
from phalanx.strategies import DDPStrategy


def normalized() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def rows_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank)) + rank


def evaluations(strategy: DDPStrategy | str) -> list[list[float]]:
    fabric = Fabric(accelerator="cpu", devices="auto", strategy=strategy)
    original = normalized()
    model, optimizer = fabric.setup(original, torch.optim.SGD(original.parameters(), lr=0.1))
    results = []
    for step in range(4):
        model.train()
        fabric.backward(model(rows_of(fabric.global_rank, step)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            results.append(model(torch.ones(1, 3)).flatten().tolist())
            if fabric.is_global_zero:
                # Nothing is left to be exchanged, so one rank may evaluate more than the others.
                model(torch.ones(1, 3))
    return results


def evaluations_by_hand() -> list[list[float]]:
    rank = Fabric(accelerator="cpu", devices="auto", strategy="ddp").world.rank
    model = DistributedDataParallel(normalized())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for step in range(4):
        model.train()
        model(rows_of(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            results.append(model(torch.ones(1, 3)).flatten().tolist())
    return results


def test_all_ranks_evaluate_with_the_buffers_of_rank_0_as_with_ddp_by_hand() -> None:
    ours, theirs = run_on_ranks(2, evaluations, "ddp"), run_on_ranks(2, evaluations_by_hand)
    assert theirs[0] == theirs[1]
    for mine in ours:
        torch.testing.assert_close(mine, theirs[0])


def test_ranks_keep_their_buffers_without_broadcast_buffers() -> None:
    first, second = run_on_ranks(2, evaluations, DDPStrategy(broadcast_buffers=False))
    assert first != second
