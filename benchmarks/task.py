"""What every side of a benchmark does: one tiny model, pre-made batches, and a description of one fit."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 32
BATCH = 16
LOG_EVERY = 50

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Job:
    """One fit. Everything but the lengths is the same for the short and the long fit whose slope is the price."""

    steps: int
    """Micro-batches in each epoch."""
    epochs: int = 1
    everyday: bool = False
    """CSV logger, progress bar, one logged value shown on the bar, early stopping on it, a checkpoint at the end."""
    barebones: bool = False
    values: int = 0
    """How many scalars are logged in every step, each by a call of its own."""
    epoch_values: int = 0
    """How many scalars are averaged over the epoch and over the ranks."""
    callbacks: int = 0
    overriding: bool = False
    """Whether each of the callbacks overrides one hook, with an empty body."""
    accumulate: int = 1
    ranks: int = 1
    directory: Path = Path()


def build() -> nn.Sequential:
    """Return the model: four parameter tensors, whose step is all overhead."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


class Batches:
    """A loader of pre-made batches, so that loading costs nothing. (A list would be many loaders to Lightning.)"""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        made = [
            (torch.randn(BATCH, WIDTH, generator=generator), torch.randint(0, 2, (BATCH,), generator=generator))
            for _ in range(64)
        ]
        self.made = [made[index % len(made)] for index in range(count)]

    def __len__(self) -> int:
        return len(self.made)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.made)


def loss_of(net: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of a batch."""
    inputs, labels = batch
    return nn.functional.cross_entropy(net(inputs), labels)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    """Return torch's AdamW as it comes."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3)


def module_class(base: Any) -> Any:
    """Return the task as a subclass of ``TrainModule`` or ``LightningModule``: their methods have the same names."""

    class Task(base):  # type: ignore[misc]
        deepest = 0

        def __init__(self, job: Job) -> None:
            super().__init__()
            self.net = build()
            self.job = job

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            if not Task.deepest:
                Task.deepest = depth_below_fit(sys._getframe())
            loss = loss_of(self.net, batch)
            if self.job.everyday:
                self.log("loss", loss, prog_bar=True)
            for index in range(self.job.values):
                self.log(f"value_{index}", loss)
            for index in range(self.job.epoch_values):
                self.log(f"mean_{index}", loss, on_step=False, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    return Task


def callback_class(base: Any, overriding: bool) -> Any:
    """Return a callback that does nothing, with or without an empty hook."""

    class Quiet(base):  # type: ignore[misc]
        @property
        def state_key(self) -> str:
            return f"quiet_{id(self)}"

    class Empty(Quiet):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            pass

    return Empty if overriding else Quiet


def depth_below_fit(frame: FrameType) -> int:
    """Return how many calls lie between the outermost ``fit`` and a frame; a direct call is 1."""
    depth, found, walked = 0, 0, frame.f_back
    while walked is not None:
        depth += 1
        # The function that runs a side is called `fit` too, and lies in this folder.
        if walked.f_code.co_name == "fit" and Path(walked.f_code.co_filename).parent.name != "benchmarks":
            found = depth
        walked = walked.f_back
    return found


class Screen(io.StringIO):
    """A terminal that nobody looks at, so that progress bars do their work and nothing is drawn."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def unseen() -> Iterator[None]:
    """Send what a fit shows to a terminal that nobody looks at."""
    kept = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = Screen()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = kept
