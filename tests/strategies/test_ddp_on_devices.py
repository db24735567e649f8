"""Manual optimization under ddp where weights are not on the CPU: the host reads nothing from the device."""

from __future__ import annotations

import pytest
import torch
from ranks import run_on_ranks
from torch import nn

from phalanx.framework.core.precision import resolve_precision
from phalanx.strategies.ddp import DDPStrategy


def reduced(device_type: str) -> list[list[float] | None]:
    """Average gradients that some ranks lack; the tensors stay on the CPU, also where the ranks are on CUDA."""
    strategy = DDPStrategy()
    world = strategy.connect("cpu", 1, resolve_precision("32-true"))
    world.device = torch.device(device_type)
    both, first, none = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    both.grad = torch.tensor([1.0, 2.0]) * (world.rank + 1)
    if world.rank == 0:
        first.grad = torch.tensor([4.0, 8.0])
    strategy.reduce_gradients([both, none, first])
    world.close()
    return [None if each.grad is None else each.grad.tolist() for each in (both, first, none)]


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_gradients_that_some_ranks_lack_are_averaged(device_type: str) -> None:
    expected = [[1.5, 3.0], [2.0, 4.0], None]
    assert run_on_ranks(2, reduced, device_type) == [expected, expected]
