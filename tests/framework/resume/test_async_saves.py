"""Saves behind the training: what they hold, who hears of them, and what is left when they fail or are killed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks

from phalanx import Trainer, checkpoint
from phalanx.callbacks import Callback


def sections(path: str | Path) -> dict[str, dict[str, torch.Tensor]]:
    found = checkpoint.open_checkpoint(path)
    return {name: found.read_section(name) for name in found.sections}


def same(first: str | Path, second: str | Path) -> bool:
    """Whether two checkpoints hold the same, byte for byte, but for when and as what they were saved."""
    one, other = sections(first), sections(second)
    mine, theirs = (dict(checkpoint.open_checkpoint(path).document) for path in (first, second))
    mine.pop("state"), theirs.pop("state")
    return mine == theirs and all(
        one[section].keys() == other[section].keys()
        and all(torch.equal(tensor, other[section][name]) for name, tensor in one[section].items())
        for section in one
    )


class SaveBoth(Callback):
    """Saves at step 3 behind the training, and at the same step here."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint("here.ckpt")
            trainer.save_checkpoint("behind.ckpt", asynchronous=True)


def fit_and_resume(strategy: str, root: Path) -> tuple[list[float], list[float], list[float]]:
    """Return the losses after step 3: of a run that saves behind its training, and of those resumed from both saves."""
    os.chdir(root)
    ranks = 1 if strategy == "single" else 2
    settings: dict[str, Any] = {"strategy": strategy, "devices": ranks, "max_epochs": 1, "default_root_dir": root}
    whole = Regressor(dropout=0.1)
    silent_trainer(**settings, callbacks=[SaveBoth()]).fit(whole, loader(48))
    resumed = []
    for name in ("behind.ckpt", "here.ckpt"):
        module = Regressor(dropout=0.1)
        silent_trainer(**settings).fit(module, loader(48), ckpt_path=root / name)
        resumed.append(module.losses)
    return whole.losses[3:], resumed[0], resumed[1]


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("zero3", 2)])
def test_a_run_resumed_from_an_asynchronous_save_equals_the_uninterrupted_run(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    for whole, behind, here in run_on_ranks(ranks, fit_and_resume, strategy, tmp_path, timeout=120.0):
        assert whole == behind == here
        assert len(whole) == 12 // ranks - 3
    assert checkpoint.verify(tmp_path / "behind.ckpt") == []
    assert same(tmp_path / "behind.ckpt", tmp_path / "here.ckpt")
