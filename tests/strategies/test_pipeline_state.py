"""Checkpoints of pipelines leave the frozen weights of all stages out; ``test_pipeline_sequences`` resumes others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from language_model import LanguageModel, token_loader
from models import silent_trainer
from ranks import run_on_ranks

import phalanx
from phalanx.callbacks import ModelCheckpoint

STEPS, HALF, WINDOW = 4, 2, 2


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
