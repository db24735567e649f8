"""Weights after a fit on ranks that have none: programs may copy them, and learn where they are if they read them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from messages import says
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import TrainModule
from phalanx.errors import PhalanxError


class Small(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def after_a_fit(strategy: str) -> list[str]:
    module = Small()
    for _ in range(2):
        # The second fit begins with weights that rank 0 alone has.
        trainer = silent_trainer(strategy=strategy, devices=2, max_steps=2)
        trainer.fit(module, [torch.ones(2, 3)] * 2)
    modules = (module, copy.deepcopy(module))
    copied = [{name: tensor.clone() for name, tensor in each.state_dict().items()} for each in modules]
    errors = []
    reads: list[Callable[[], Any]] = [
        lambda: float(module.net.weight.detach().norm()),
        lambda: module.net(torch.ones(1, 3)),
        lambda: copied[1]["net.weight"].tolist(),
        lambda: pickle.loads(pickle.dumps(copied[0]))["net.bias"].sum().item(),
    ]
    for read in reads:
        try:
            read()
        except PhalanxError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_weights_that_are_on_rank_0_alone_after_a_fit_may_be_copied_and_not_read(strategy: str) -> None:
    first, second = run_on_ranks(2, after_a_fit, strategy)
    assert first == []
    assert len(second) == 4
    says(second, "gather_weights")
