"""``fit(torch.compile(module))``: the steps run compiled, and everything else sees the module itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled_graphs import GRAPHS, counting, forget_compiled
from messages import refuses
from models import Regressor, loader, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx.framework.checkpoint.reader import open_checkpoint
from phalanx.framework.core.errors import ConfigurationError


class Steps(Regressor):
    """Notes whether each step was traced by the compiler."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.sin(self(batch[0]))


def trained(strategy: str, ranks: int, root: str, is_compiled: bool) -> tuple[Tensor, dict[str, float], Tensor, int]:
    forget_compiled()
    module = Steps()
    model: Any = torch.compile(module, backend=counting) if is_compiled else module
    trainer = silent_trainer(
        strategy=strategy, devices=ranks, max_epochs=1, default_root_dir=root, num_sanity_val_steps=0
    )
    before = set(vars(module))
    trainer.fit(model, loader(16), loader(8))
    count = len(GRAPHS)
    path = f"{root}/{is_compiled}.ckpt"
    trainer.save_checkpoint(path)
    assert set(open_checkpoint(path).names("model")) == set(module.state_dict())
    (metrics,) = trainer.test(model, loader(8), ckpt_path=path, verbose=False)
    outputs = trainer.predict(model, loader(8))
    assert outputs is not None
    (again,) = trainer.test(dataloaders=loader(8), verbose=False)
    assert again == metrics
    assert trainer.model is module
    # The steps of the class are back.
    assert not {"training_step", "forward", "log"} & (set(vars(module)) - before)
    return weights_of(module) if trainer.is_global_zero else torch.zeros(0), metrics, torch.cat(outputs), count


@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp", 2), ("zero2", 2)])
def test_a_compiled_module_trains_like_the_module(strategy: str, ranks: int, tmp_path: Path) -> None:
    plain = run_on_ranks(ranks, trained, strategy, ranks, str(tmp_path), False)
    compiled = run_on_ranks(ranks, trained, strategy, ranks, str(tmp_path), True)
    for (weights, metrics, outputs, count), expected in zip(compiled, plain, strict=True):
        torch.testing.assert_close(weights, expected[0])
        assert metrics == pytest.approx(expected[1])
        torch.testing.assert_close(outputs, expected[2])
        assert count > 0
        assert expected[3] == 0


def test_a_strategy_whose_hooks_cannot_be_compiled_refuses() -> None:
    model: Any = torch.compile(Steps(), backend="eager")
    with refuses(ConfigurationError, "strategy='zero3'", "torch.compile"):
        silent_trainer(strategy="zero3", devices=1).fit(model, loader(8))
