"""Rank 0's tensors on all ranks."""

from __future__ import annotations

import pytest
import torch
from messages import says
from ranks import run_on_ranks
from torch import nn

from phalanx import Fabric
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.distributed.world import World
from phalanx.framework.parallel.meta_device import share_tensors


def shared() -> dict[str, list[float]]:
    world = World.from_environment("cpu")
    module = nn.Module()
    for name in ("plain", "transposed", "loaded"):
        values = torch.full((2, 3), float(world.rank + 1))
        values[0, 1] += 4.0
        module.register_parameter(name, nn.Parameter(values.t() if name == "transposed" else values))
    module.register_parameter("empty", nn.Parameter(torch.empty(0, 3)))
    module.register_buffer("count", torch.tensor(world.rank + 1))
    share_tensors(module, world, {"loaded"})
    assert not module.get_parameter("transposed").is_contiguous()
    return {name: one.flatten().tolist() for name, one in [*module.named_parameters(), *module.named_buffers()]}


def test_all_but_those_that_are_loaded_later_are_those_of_rank_zero() -> None:
    first, second = run_on_ranks(2, shared)
    assert first["plain"] == second["plain"] == [1, 5, 1, 1, 1, 1]
    assert first["transposed"] == second["transposed"] == [1, 1, 5, 1, 1, 1]
    assert first["count"] == second["count"] == [1]
    assert second["loaded"] == [2, 6, 2, 2, 2, 2]


def of_unequal_width(strategy: str) -> str:
    fabric = Fabric(devices=2, strategy=strategy)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + fabric.global_rank))
    with pytest.raises(ConfigurationError) as refused:
        fabric.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    return str(refused.value)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_with_different_parameters_are_refused(strategy: str) -> None:
    says(run_on_ranks(2, of_unequal_width, strategy), "rank", "1.weight")
