"""The small transformer with matrices updated by Muon and the rest by AdamW, and its training written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from language_model import LanguageModel, token_loader, tokens
from models import silent_trainer
from parity_table import strategy_named
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from phalanx import Split, Trainer
from phalanx.callbacks import LambdaCallback

GLOBAL_BATCH, CLIP, STEPS = 8, 0.5, 8
ROWS = 16 * GLOBAL_BATCH
MATRICES = tuple(f"blocks.*.{name}.weight" for name in ("query", "key", "value", "project", "widen", "narrow"))


def rate(step: int) -> float:
    """Return the factor of the learning rates."""
    return (step + 1) / 4 if step < 3 else 0.95**step


class SplitModel(LanguageModel):
    """Trains with a ``Split`` and a schedule of both learning rates.

    Args:
        kind: ``"muon"`` or ``"adamw"``, which update the matrices.
    """

    def __init__(self, kind: str = "muon") -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        matrices: Any = partial(torch.optim.Muon, lr=2e-3, weight_decay=0.1)
        if self.kind == "adamw":
            matrices = partial(torch.optim.AdamW, lr=2e-3, betas=(0.8, 0.9))
        rest = partial(torch.optim.AdamW, lr=5e-3, weight_decay=0.0)
        optimizer = Split(self.named_parameters(), {MATRICES: matrices, "*": rest})
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, rate), "interval": "step"}}


@cache
def by_hand(kind: str = "muon", steps: int = STEPS) -> list[float]:
    """Train in one process with two optimizers of torch; return the loss of each step."""
    module, rows = LanguageModel(), tokens(ROWS)
    named = dict(module.named_parameters())
    chosen = [name for name in named if name.startswith("blocks.") and named[name].dim() == 2]
    matrices, rest = [named[name] for name in chosen], [named[name] for name in named if name not in chosen]
    first: torch.optim.Optimizer = torch.optim.Muon(matrices, lr=2e-3, weight_decay=0.1)
    if kind == "adamw":
        first = torch.optim.AdamW(matrices, lr=2e-3, betas=(0.8, 0.9))
    second = torch.optim.AdamW(rest, lr=5e-3, weight_decay=0.0)
    bases, losses = [first.param_groups[0]["lr"], second.param_groups[0]["lr"]], []
    for step in range(steps):
        start = step * GLOBAL_BATCH % ROWS
        loss = module.loss(rows[start : start + GLOBAL_BATCH])
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        for optimizer, base in zip((first, second), bases, strict=True):
            optimizer.param_groups[0]["lr"] = base * rate(step)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained(
    strategy: str,
    ranks: int,
    folder: str,
    kind: str = "muon",
    stop: int = STEPS,
    resume: str | None = None,
    saves: Mapping[int, str] | None = None,
) -> tuple[list[float], torch.Tensor | None]:
    """Train up to a step, from a checkpoint, and save after some. Runs on each rank.

    Returns:
        The losses of this rank's batches, and all weights if the rank has them.
    """

    def save(trainer: Trainer, *_: Any) -> None:
        path = (saves or {}).get(trainer.global_step)
        if path is not None:
            trainer.save_checkpoint(path)

    module = SplitModel(kind)
    trainer = silent_trainer(
        strategy=strategy_named(strategy, folder),
        devices=ranks,
        max_steps=stop,
        gradient_clip_val=CLIP,
        callbacks=[LambdaCallback(on_train_batch_end=save)],
        default_root_dir=folder,
    )
    parts = ranks // 2 if strategy == "fsdp+tp" else ranks
    trainer.fit(module, token_loader(ROWS, GLOBAL_BATCH // parts), ckpt_path=resume)
    state = list(module.state_dict().values())
    here = not any(tensor.is_meta for tensor in state)
    return module.losses, torch.cat([tensor.flatten() for tensor in state]) if here else None


def mean_losses(found: Sequence[tuple[list[float], Any]]) -> torch.Tensor:
    """Return the loss of each step, the mean over ranks."""
    return torch.tensor([losses for losses, _ in found], dtype=torch.float64).mean(0)


def paths(folder: Path, steps: Sequence[int]) -> dict[int, str]:
    """Return a path for the checkpoint of each step."""
    return {step: str(folder / f"step-{step}") for step in steps}
