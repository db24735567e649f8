"""Runs of a module with odd parameters, in parts under any strategy: what tests of resuming train."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import silent_trainer
from parity_table import strategy_named
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, TrainModule
from phalanx.callbacks import LambdaCallback
from phalanx.framework.checkpoint.reader import open_checkpoint

GLOBAL_BATCH, EPOCH_STEPS, STEPS = 12, 4, 8


@dataclass(frozen=True)
class Recipe:
    """How a run trains.

    ``scalar`` adds a parameter without dims, ``empty`` an empty one, ``late`` one that is first used at that step.
    """

    optimizer: str = "adamw"
    scheduler: str = "none"
    precision: str = "32-true"
    scalar: bool = False
    empty: bool = False
    late: int | None = None
    groups: int = 2


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a frozen layer, a tied weight, a buffer without dims."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(7)
        self.back = nn.Linear(7, 5, bias=False)
        self.back.weight = nn.Parameter(self.first.weight.detach().T.clone())
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.first.weight
        self.head = nn.Linear(7, 1)
        if recipe.empty:
            self.empty = nn.Parameter(torch.empty(0, 3))
        if recipe.late is not None:
            self.late = nn.Parameter(torch.ones(3, 1))
        if recipe.scalar:
            self.scale = nn.Parameter(torch.tensor(0.7))
        # Global: the same whatever part of a batch a rank has.
        self.norm.eval()
        self.norm.train = lambda mode=True: self.norm  # type: ignore[method-assign]

    def forward(self, x: Tensor, uses_late: bool) -> Tensor:
        """Return [batch, 1] for [batch, 5]."""
        x = self.norm(torch.tanh(self.first(x)))
        x = x + self.frozen(x)
        x = torch.tanh(self.again(self.back(x)))
        if hasattr(self, "scale"):
            x = x * self.scale
        if hasattr(self, "empty"):
            x = x + self.empty.sum()
        if uses_late:
            x = x * self.late.sum()
        out: Tensor = self.head(x)
        return out


def odd(recipe: Recipe) -> Odd:
    """Return one with fixed weights."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Odd(recipe)


def samples() -> tuple[Tensor, Tensor]:
    """Return the inputs [samples, 5] and targets [samples, 1] of an epoch."""
    x = torch.randn(GLOBAL_BATCH * EPOCH_STEPS, 5, generator=torch.Generator().manual_seed(1))
    return x, torch.sin(x.sum(1, keepdim=True))


def optimizer_of(net: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the optimizer of a recipe; its groups have different hyperparameters."""
    parameters = [one for one in net.parameters() if one.numel()]
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if recipe.groups == 2:
        groups = [{"params": [one for one in parameters if one.dim() > 1]}]
        groups.append({"params": [one for one in parameters if one.dim() < 2], "lr": 0.02})
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "adamw": (torch.optim.AdamW, {"eps": 1e-4, "weight_decay": 0.0}),
        "amsgrad": (torch.optim.AdamW, {"amsgrad": True, "eps": 1e-4, "weight_decay": 0.0}),
        "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
        "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True, "eps": 1e-3}),
        "nadam": (torch.optim.NAdam, {"eps": 1e-3}),
        "adafactor": (torch.optim.Adafactor, {}),
    }
    kind, arguments = kinds[recipe.optimizer]
    made: torch.optim.Optimizer = kind(groups, lr=0.01, **arguments)
    return made


def scheduler_of(optimizer: torch.optim.Optimizer, recipe: Recipe) -> Any:
    """Return the scheduler of a recipe, or None."""
    if recipe.scheduler == "lambda":
        return lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    if recipe.scheduler == "onecycle":
        return lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 0.03][: recipe.groups], total_steps=STEPS + 1)
    if recipe.scheduler == "plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
    if recipe.scheduler == "sequence":
        parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])
    return None


class OddModule(TrainModule):
    """Trains an ``Odd`` by a recipe; notes its losses and learning rates."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.net = odd(recipe)
        self.recipe = recipe
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        late = self.recipe.late
        loss = nn.functional.mse_loss(self.net(x, late is not None and self.global_step >= late).to(y.dtype), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self, self.recipe)
        scheduler = scheduler_of(optimizer, self.recipe)
        if scheduler is None:
            return optimizer
        config: dict[str, Any] = {"scheduler": scheduler, "interval": "step"}
        if self.recipe.scheduler == "plateau":
            config = {"scheduler": scheduler, "interval": "epoch", "monitor": "figure"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def on_train_epoch_end(self) -> None:
        self.log("figure", 1.0)


def by_hand(recipe: Recipe, steps: int = STEPS) -> list[float]:
    """Train in one process with plain torch; return the loss of each step."""
    net, (x, y) = odd(recipe), samples()
    optimizer = optimizer_of(net, recipe)
    scheduler = scheduler_of(optimizer, recipe)
    losses = []
    for step in range(steps):
        part = slice(step % EPOCH_STEPS * GLOBAL_BATCH, (step % EPOCH_STEPS + 1) * GLOBAL_BATCH)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(x[part], recipe.late is not None and step >= recipe.late), y[part])
        loss.backward()
        optimizer.step()
        if recipe.scheduler == "plateau":
            if step % EPOCH_STEPS == EPOCH_STEPS - 1:
                scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


def part(
    strategy: str, ranks: int, recipe: Recipe, root: str, stop: int, resume: str | None, save: str | None
) -> list[float]:
    """Train up to a step, from a checkpoint and to one; return this rank's losses. None is trained where it stands."""

    def end(trainer: Trainer, _: Any) -> None:
        if save:
            trainer.save_checkpoint(save)

    module = OddModule(recipe)
    trainer = silent_trainer(
        strategy=strategy_named(strategy, root),
        devices=ranks,
        precision=recipe.precision,
        max_steps=stop,
        callbacks=[LambdaCallback(on_train_end=end)],
        default_root_dir=root,
    )
    x, y = samples()
    if recipe.precision in ("64-true", "bf16-true"):
        x, y = (one.to(torch.float64 if recipe.precision == "64-true" else torch.bfloat16) for one in (x, y))
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=GLOBAL_BATCH // ranks), ckpt_path=resume)
    assert trainer.global_step == stop
    return module.losses


def train(layout: str, recipe: Recipe, root: Path, stop: int, resume: Path | None, save: Path | None) -> list[float]:
    """Train a part under a layout such as ``fsdp@2``; return the loss of each step, the mean over ranks."""
    strategy, _, ranks = layout.partition("@")
    paths = (str(path) if path else None for path in (resume, save))
    results = run_on_ranks(int(ranks), part, strategy, int(ranks), recipe, str(root), stop, *paths)
    return torch.tensor(results, dtype=torch.float64).mean(0).tolist()


def along(chain: str, recipe: Recipe, root: Path, first: int = 2, step: int = 2) -> list[float]:
    """Train a chain of layouts, each from the checkpoint of the one before; return the loss of each step."""
    losses: list[float] = []
    saved: Path | None = None
    for number, layout in enumerate(chain.split()):
        save = root / f"{number}.ckpt"
        losses += train(layout, recipe, root, first + number * step, saved, save)
        saved = save
    return losses


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint's model and optimizers."""
    checkpoint = open_checkpoint(path)
    return {
        f"{section}: {name}": tensor
        for section in ("model", "optimizer")
        for name, tensor in checkpoint.read_section(section).items()
    }
