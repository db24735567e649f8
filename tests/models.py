"""Small modules and data that several tests train."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, TrainModule
from phalanx.errors import ConfigurationError, LoopError

# A Trainer that writes and prints nothing.
SILENT: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def regression_data(count: int = 64, seed: int = 0) -> TensorDataset:
    """Return ``count`` inputs of 6 features with a smooth target."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def network(seed: int = 3, dropout: float = 0.0) -> nn.Sequential:
    """Return a small network with fixed initial weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 1)]
        return nn.Sequential(*layers)


class Regressor(TrainModule):
    """Trains ``network`` and notes the loss of every micro-batch."""

    def __init__(self, lr: float = 0.05, dropout: float = 0.0, optimizer: str = "adamw") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = network(dropout=dropout)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        if self.hparams["optimizer"] == "sgd":
            return torch.optim.SGD(self.parameters(), lr=self.hparams["lr"], momentum=0.9)
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class ByHand(TrainModule):
    """A base before that of a module, whose training step then makes the optimizer step itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss: Any = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()


def loader(count: int = 64, batch_size: int = 4, **arguments: Any) -> DataLoader[Any]:
    """Return a loader over ``regression_data``."""
    return DataLoader(regression_data(count), batch_size=batch_size, **arguments)


def silent_trainer(**arguments: Any) -> Trainer:
    """Return a Trainer that writes and prints nothing, unless told otherwise."""
    return Trainer(**{**SILENT, **arguments})


def leave_after_refusal(attempt: Callable[[], Any]) -> NoReturn:
    """Print the refusal of an attempt and end this rank, so that no other one waits for it."""
    try:
        attempt()
    except (ConfigurationError, LoopError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(1)


def windows_of(size: int, windows: Sequence[int], steps: int) -> list[slice]:
    """Return the rows of each step, which has ``size`` of them for each batch of its window."""
    ends = accumulate(size * windows[step % len(windows)] for step in range(steps))
    return [slice(*each) for each in pairwise([0, *ends])]


def plain_steps(
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Any], Tensor],
    batches: Iterable[Any],
    clip: float | None = None,
) -> list[float]:
    """Train with plain torch, one step for each batch, and return the losses. ``clip``: the largest norm."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


def step_means(ranks: Sequence[Sequence[float]], windows: Sequence[int]) -> Tensor:
    """Return the mean loss of each step, in which each rank has the losses of as many micro-batches as its window."""
    losses = torch.tensor(ranks, dtype=torch.float64).mean(0)
    return torch.stack([part.mean() for part in losses.split(list(windows))])


def full_weights(module: nn.Module) -> Tensor | None:
    """Return all weights in one vector; None on a rank that does not hold all of them."""
    return None if any(parameter.is_meta for parameter in module.parameters()) else weights_of(module)


def weights_of(module: nn.Module) -> Tensor:
    """Return all weights in one vector."""
    return torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])


def equal(one: Any, other: Any) -> bool:
    """Whether nested dicts and lists hold equal values, tensors to the bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)
