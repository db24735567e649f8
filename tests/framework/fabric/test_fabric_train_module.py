"""A ``TrainModule`` that a Fabric has set up: its steps, its log, and the objects that it reads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Fabric, TrainModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.loggers import CSVLogger


class Stepping(TrainModule):
    """Records the dtype in which its layer runs in each step."""

    def __init__(self, automatic: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.layer = nn.Linear(4, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.seen.append(y.dtype)
        return y

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self(batch).float().square().mean()
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, 0.1)
        optimizer.step()
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output: Tensor = self(batch)
        return output


def stepped(strategy: str, automatic: bool) -> tuple[list[float], set[torch.dtype], tuple[int, int]]:
    fabric = Fabric(accelerator="cpu", devices="auto", strategy=strategy, precision="bf16-mixed")
    original = Stepping(automatic)
    model, optimizer = fabric.setup(original, torch.optim.SGD(original.parameters(), lr=0.5))
    share = torch.linspace(-1, 1, 16).view(4, 4).chunk(fabric.world_size)[fabric.global_rank]
    for number in range(3):
        loss = model.training_step(share, number)
        if loss is not None:
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
    with torch.no_grad():
        outputs = model.validation_step(torch.ones(1, 4), 0).flatten().tolist()
    return outputs, set(original.seen), (model.global_rank, model.global_step)


@pytest.mark.parametrize("automatic", [True, False])
def test_steps_run_in_the_precision_and_through_the_strategy(automatic: bool) -> None:
    expected, dtypes, place = stepped("single", automatic)
    assert dtypes == {torch.bfloat16}
    assert place == (0, 3)
    for strategy in ("ddp", "fsdp"):
        for rank, (outputs, seen, own_place) in enumerate(run_on_ranks(2, stepped, strategy, automatic)):
            assert outputs == pytest.approx(expected, abs=2e-2)
            assert seen == {torch.bfloat16}
            assert own_place == (rank, 3)


def test_a_module_logs_to_the_loggers_of_its_fabric(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(tmp_path, name="run", version=0))
    original = Stepping()
    model, optimizer = fabric.setup(original, torch.optim.SGD(original.parameters(), lr=0.5))
    scheduler = fabric.setup_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1))
    loss = model.training_step(torch.ones(1, 4), 0)
    model.log("hidden", 1.0, logger=False)
    fabric.end_training()
    lines = (tmp_path / "run" / "version_0" / "metrics.csv").read_text().splitlines()
    assert str(loss.item())[:6] in lines[1]
    assert "hidden" not in lines[0]
    assert model.logger is fabric.logger
    assert model.fabric is fabric
    assert model.optimizers() is optimizer
    assert model.lr_schedulers() is scheduler
    with refuses(ConfigurationError, "self.trainer.max_epochs"):
        _ = model.trainer.max_epochs
    # A copy belongs to no Fabric.
    copy.deepcopy(model).log("loss", 1.0)
    fabric.free_memory()
    with refuses(ConfigurationError, "Stepping", "Trainer.fit"):
        _ = original.fabric
