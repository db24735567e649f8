"""Settings that change where stage 3 keeps weights (a disk, ZeRO++'s secondary partition) do not change training.

Layers are large enough to be offloaded to a disk, and are built in full or split as they are built.
"""

from __future__ import annotations

import contextlib
import io
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from models import plain_steps, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule
from phalanx.strategies import DeepSpeedStrategy
from phalanx.strategies.deepspeed.arguments import ZeroArguments

# Half of the middle layer is 2 MiB; DeepSpeed leaves less than 1 MiB in memory.
WIDTH, STEPS, BATCH = 1024, 3, 8


def net_of() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(16, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def data() -> Tensor:
    return torch.randn(STEPS * BATCH, 16, generator=torch.Generator().manual_seed(5))


def loss_of(net: nn.Module, rows: Tensor) -> Tensor:
    loss: Tensor = (net(rows) - rows.sum(1, keepdim=True)).square().mean()
    return loss


class Wide(TrainModule):
    """Builds its layers at once or in ``configure_model``."""

    net: nn.Sequential

    def __init__(self, late: bool) -> None:
        super().__init__()
        if not late:
            self.net = net_of()

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = net_of()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return loss_of(self.net, batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)


def trained(late: bool, arguments: ZeroArguments) -> dict[str, Tensor]:
    """Return the full weights after a fit on these ranks."""
    given: ZeroArguments = {"stage": 3, "gather_weights": "all", **arguments}
    strategy = DeepSpeedStrategy(**given)
    module = Wide(late)
    loader = DataLoader(TensorDataset(data()), batch_size=BATCH // 2)
    trainer = silent_trainer(strategy=strategy, devices=2, max_epochs=1)
    trainer.fit(module, loader)
    return {name: tensor.clone() for name, tensor in module.net.state_dict().items()}


def by_hand() -> dict[str, Tensor]:
    net = net_of()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-4)
    plain_steps(optimizer, partial(loss_of, net), data().split(BATCH))
    return net.state_dict()


def check(late: bool, arguments: ZeroArguments) -> None:
    expected = by_hand()
    for weights in run_on_ranks(2, trained, late, arguments):
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.nvme
@pytest.mark.parametrize("late", [False, True], ids=["whole", "split as built"])
def test_offload_to_a_disk_does_not_change_training(late: bool, tmp_path: Path) -> None:
    check(late, {"offload_optimizer": "nvme", "offload_parameters": "nvme", "nvme_path": str(tmp_path)})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("late", [False, True], ids=["whole", "split as built"])
def test_a_secondary_partition_does_not_change_training(late: bool) -> None:
    check(late, {"config": {"zero_optimization": {"zero_hpz_partition_size": 2}, "comms_logger": {"enabled": True}}})


def printed(config: dict[str, object]) -> str:
    """Return what a rank prints in a fit."""
    strategy = DeepSpeedStrategy(stage=1, config=config)
    trainer = silent_trainer(strategy=strategy, devices=2, max_epochs=1, precision="bf16-mixed")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        trainer.fit(Wide(False), DataLoader(TensorDataset(data()), batch_size=BATCH // 2))
    return said.getvalue()


@pytest.mark.parametrize("asked", [False, True])
def test_memory_breakdown_is_printed_only_on_request(asked: bool) -> None:
    first, _ = run_on_ranks(2, printed, {"memory_breakdown": asked})
    assert ("begin bf16_optimizer" in first) == asked
