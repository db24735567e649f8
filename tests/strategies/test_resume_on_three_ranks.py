"""A resumed run on three ranks, whose sums depend on the order of the ranks, is the run that never stopped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import silent_trainer
from ranks import run_on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Callback, TrainModule


class Wide(TrainModule):
    """Layers large enough that the ranks' gradients are rounded differently if they are summed in another order.

    They are defined in another order than that in which they are used.
    """

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.last = nn.Linear(96, 10)
            self.net = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return nn.functional.cross_entropy(self.last(self.net(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class SaveAt(Callback):
    """Saves after one of the steps, and keeps the weights after the last as they are on this rank."""

    def __init__(self, step: int, path: str) -> None:
        self.step = step
        self.path = path
        self.weights: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # Within a window nothing can be saved.
        if trainer.global_step == self.step and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.weights = [getattr(one, "to_local", lambda one=one: one)().detach().clone() for one in module.parameters()]


def trained(strategy: str, path: str, arguments: dict[str, Any], ckpt_path: str | None) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(480, 48, generator=generator), torch.randint(0, 10, (480,), generator=generator))
    save = SaveAt(3, path)
    trainer = silent_trainer(devices=3, strategy=strategy, max_steps=8, callbacks=[save], **arguments)
    trainer.fit(Wide(), DataLoader(data, 8, shuffle=True), ckpt_path=ckpt_path)
    return save.weights


def whole_and_resumed(strategy: str, path: str, arguments: dict[str, Any]) -> bool:
    whole = trained(strategy, path, arguments, None)
    resumed = trained(strategy, path, arguments, path)
    return len(whole) == 6 and all(map(torch.equal, whole, resumed))


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        ("ddp", {}),
        ("ddp", {"accumulate_grad_batches": 2}),
        ("ddp_find_unused_parameters_true", {}),
        ("fsdp", {}),
        ("zero1", {}),
        ("zero2", {"accumulate_grad_batches": 2}),
    ],
)
def test_resuming_on_three_ranks(tmp_path: Any, strategy: str, arguments: dict[str, Any]) -> None:
    assert run_on_ranks(3, whole_and_resumed, strategy, str(tmp_path / "saved.ckpt"), arguments) == [True] * 3
