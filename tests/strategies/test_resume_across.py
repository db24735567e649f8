"""A checkpoint of any strategy goes on under any other: the losses are those of the run that nobody interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from language_model import LanguageModel, token_loader
from models import silent_trainer
from parity_table import GLOBAL_BATCH, ROWS, STRATEGIES, by_hand, strategy_named
from ranks import run_on_ranks

from phalanx.callbacks import LambdaCallback

FIRST, STEPS, WINDOW, CLIP = 4, 10, 2, 0.5
SHARDED = [name for name in STRATEGIES if name not in ("single", "ddp")]


def part(strategy: str, root: str, stop: int, resume: str | None, save: str | None) -> list[float]:
    """Train up to a step, from a checkpoint and to one; return the losses of this rank's micro-batches."""
    ranks, parts = STRATEGIES[strategy]
    module = LanguageModel()
    saver = LambdaCallback(on_train_end=lambda trainer, _: trainer.save_checkpoint(save) if save else None)
    trainer = silent_trainer(
        strategy=strategy_named(strategy, root),
        devices=ranks,
        max_steps=stop,
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=CLIP,
        callbacks=[saver],
        default_root_dir=root,
    )
    trainer.fit(module, token_loader(ROWS, GLOBAL_BATCH // parts), ckpt_path=resume)
    assert trainer.global_step == stop
    return module.losses


def losses(strategy: str, root: Path, stop: int, resume: Path | None, save: Path | None) -> list[float]:
    """Return the loss of each optimizer step of a part."""
    ranks, _ = STRATEGIES[strategy]
    given = (strategy, str(root), stop, str(resume) if resume else None, str(save) if save else None)
    results = [part(*given)] if ranks == 1 else run_on_ranks(ranks, part, *given)
    rows = torch.tensor(results, dtype=torch.float64).mean(0)
    return rows.view(-1, WINDOW).mean(1).tolist()


@pytest.fixture(scope="module")
def uninterrupted() -> list[float]:
    return by_hand("32-true", (WINDOW,), CLIP)[:STEPS]


@pytest.mark.parametrize("strategy", SHARDED)
def test_there_and_back(strategy: str, tmp_path: Path, uninterrupted: list[float]) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    found = losses("single", tmp_path, FIRST, None, first)
    found += losses(strategy, tmp_path, FIRST + 3, first, second)
    found += losses("ddp", tmp_path, STEPS, second, None)
    assert found == pytest.approx(uninterrupted, rel=1e-5)


@pytest.mark.parametrize(("one", "other"), [("zero1", "zero3"), ("zero3", "fsdp"), ("fsdp", "zero2-offload")])
def test_from_one_split_to_another(one: str, other: str, tmp_path: Path, uninterrupted: list[float]) -> None:
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    found = losses(one, tmp_path, FIRST, None, first)
    found += losses(other, tmp_path, FIRST + 3, first, second)
    found += losses(one, tmp_path, STEPS, second, None)
    assert found == pytest.approx(uninterrupted, rel=1e-5)
