"""A small module that has what strategies trip over, and the places of ZeRO where state can live.

``zero1-offload`` is not among them: it steps as ``zero2-offload`` does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from phalanx import TrainModule

GLOBAL_BATCH = 6
PLACES: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero2-offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3-offload": {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
}


class Mixture(nn.Module):
    """Odd sizes, a tied weight, a frozen layer, parameters that nobody or nobody always uses, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.frozen = nn.Linear(7, 7)
        self.norm = nn.LayerNorm(7)
        self.widen, self.narrow = nn.Linear(7, 13), nn.Linear(13, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.linspace(-0.1, 0.1, 7))

    def forward(self, rows: Tensor) -> Tensor:
        """Return logits [batch, length, 11] of tokens [batch, length]; a first token of 0 uses all parameters."""
        x = self.embed(rows)
        x = x + self.frozen(self.norm(x)) * self.scale
        x = x + self.narrow(torch.tanh(self.widen(x)))
        if int(rows[0, 0]) == 0:
            x = x + self.sometimes(x)
        logits: Tensor = self.head(x + self.shift)
        return logits


def mixture() -> Mixture:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        return Mixture()


def loss_of(net: nn.Module, rows: Tensor) -> Tensor:
    logits = net(rows)[:, :-1].flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, rows[:, 1:].flatten())


def rows_of(count: int, uses_all: bool = True) -> Tensor:
    rows = torch.randint(0, 11, (20 * GLOBAL_BATCH, 5), generator=torch.Generator().manual_seed(2))[:count]
    rows[:, 0] = 0
    if not uses_all:
        # Micro-batches of two, of which some use all parameters, on both of two ranks.
        rows[:, 0] = (torch.arange(count) // GLOBAL_BATCH) % 3
    return rows


def optimizer_of(net: nn.Module, kind: str = "adamw") -> torch.optim.Optimizer:
    """Return an optimizer with two groups; what must not be decayed, as some never get a gradient, is in the second."""
    names = dict(net.named_parameters())
    plain = [one for name, one in names.items() if one.dim() < 2 or "sometimes" in name]
    taken = {id(one) for one in plain}
    others = [one for one in names.values() if id(one) not in taken]
    groups: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    if kind == "adam":
        return torch.optim.Adam(groups, lr=2e-2, eps=1e-4, betas=(0.8, 0.99))
    return torch.optim.AdamW(groups, lr=2e-2, eps=1e-4, amsgrad=kind == "amsgrad")


class MixtureModule(TrainModule):
    """Trains a ``Mixture`` and notes the loss of every micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mixture()
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.net)


def scheduler_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
