"""Checkpoints of pipelines: bit-identical resumption, and exchange with other strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import LanguageModel, token_loader
from models import silent_trainer
from ranks import run_on_ranks
from torch import nn

import phalanx
from phalanx import Trainer
from phalanx.callbacks import LambdaCallback, ModelCheckpoint
from phalanx.strategies import PipelineStrategy

STEPS, HALF, WINDOW = 4, 2, 2
# By mesh of a pipeline.
RANKS = {"": 2, "pp=2,dp_shard=2": 4, "pp=2,tp=2": 4}


class Dropping(LanguageModel):
    """Drops out in the blocks and after them."""

    def __init__(self, rate: float) -> None:
        super().__init__(blocks=4)
        for block in (*self.blocks, self.norm):
            block.register_forward_hook(lambda part, args, output: nn.functional.dropout(output, rate))


def fitted(
    strategy: Any, parallel: str, ranks: int, steps: int, save: int, path: str, start: str | None, rate: float
) -> tuple[list[float], dict[str, Any]]:
    """Train up to a step and save after ``save``; return this rank's losses of each step, and the weights it holds."""

    def saving(trainer: Trainer, *_: Any) -> None:
        if save and trainer.global_step == save and not Path(path).exists():
            trainer.save_checkpoint(path)

    module = Dropping(rate)
    trainer = silent_trainer(
        devices=ranks,
        strategy=strategy,
        parallel=parallel or None,
        max_steps=steps,
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=0.5,
        callbacks=[LambdaCallback(on_train_batch_end=saving)],
    )
    shards = trainer.fabric.resources.data_size
    trainer.fit(module, token_loader(STEPS * 8, batch_size=8 // WINDOW // shards), ckpt_path=start)
    losses = torch.tensor(module.losses).view(-1, WINDOW).mean(1) if module.losses else torch.zeros(0)
    return losses.tolist(), {name: each.detach() for name, each in module.named_parameters() if not each.is_meta}


def run(
    name: str, steps: int, save: int, path: Path, start: Path | None = None, rate: float = 0.0
) -> tuple[list[float], Any]:
    name, _, parallel = name.partition(" ")
    ranks = RANKS[parallel] if name.startswith("pipeline") else 1 if name == "single" else 2
    strategy = PipelineStrategy(name.partition(":")[2] or "1f1b") if name.startswith("pipeline") else name
    given = (steps, save, str(path), str(start) if start else None, rate)
    results = run_on_ranks(ranks, fitted, strategy, parallel, ranks, *given)
    losses = [result[0] for result in results if result[0]]
    return torch.tensor(losses).mean(0).tolist(), results[0][1]


@pytest.mark.parametrize(
    "name", ["pipeline:zero-bubble-v", "pipeline pp=2,dp_shard=2", "pipeline:zero-bubble pp=2,tp=2"]
)
def test_a_resumed_pipeline_continues_bit_by_bit(name: str, tmp_path: Path) -> None:
    losses, weights = run(name, STEPS, HALF, tmp_path / "half", rate=0.3)
    second, resumed = run(name, STEPS, 0, tmp_path / "none", tmp_path / "half", rate=0.3)
    assert second == losses[HALF:]
    assert weights.keys() == resumed.keys()
    assert all(torch.equal(weights[key], resumed[key]) for key in weights)


class Lean(LanguageModel):
    """Trains its blocks alone, and leaves the rest out of checkpoints."""

    save_frozen = False

    def __init__(self) -> None:
        super().__init__(blocks=4)
        self.requires_grad_(False)
        self.blocks.requires_grad_(True)
        # On both stages something is frozen.
        for block in (self.blocks[0], self.blocks[3]):
            next(block.parameters()).requires_grad_(False)


def lean(steps: int, folder: str, start: str | None) -> tuple[list[float], dict[str, Any]]:
    """Train up to a step, saving there; return the losses and the weights that this rank holds."""
    module = Lean()
    saver = ModelCheckpoint(folder, filename=f"{steps}", every_n_train_steps=steps)
    trainer = silent_trainer(
        devices=2, strategy="pipeline", max_steps=steps, accumulate_grad_batches=WINDOW, enable_checkpointing=True,
        callbacks=[saver],
    )  # fmt: skip
    trainer.fit(module, token_loader(STEPS * 8, batch_size=8 // WINDOW), ckpt_path=start)
    return module.losses, {name: each.detach() for name, each in module.named_parameters() if not each.is_meta}


def test_frozen_weights_of_all_stages_are_left_out(tmp_path: Path) -> None:
    whole = run_on_ranks(2, lean, STEPS, str(tmp_path / "whole"), None)
    run_on_ranks(2, lean, HALF, str(tmp_path / "half"), None)
    (saved,) = (tmp_path / "half").glob("*.ckpt")
    left_out = phalanx.checkpoint.open_checkpoint(saved).left_out
    every = Lean().named_parameters(remove_duplicate=False)
    frozen = {name: each for name, each in every if not each.requires_grad}
    assert {name: record.shape for name, record in left_out.items()} == {
        name: tuple(each.shape) for name, each in frozen.items()
    }
    resumed = run_on_ranks(2, lean, STEPS, str(tmp_path / "rest"), str(saved))
    for (_, expected), (_, weights) in zip(whole, resumed, strict=True):
        assert expected.keys() == weights.keys()
        assert all(torch.equal(expected[name], weights[name]) for name in expected)
