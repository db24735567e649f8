"""The common task of all sides of a benchmark: a tiny model, prepared batches, and the description of one fit."""

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
    """One fit. Only the lengths differ between the short and the long fit, whose slope is the cost of a step."""

    steps: int
    """Micro-batches in each epoch."""
    epochs: int = 1
    everyday: bool = False
    """CSV logger, progress bar, one logged value shown on the bar, early stopping on it, a checkpoint at the end."""
    barebones: bool = False
    values: int = 0
    """Number of scalars logged in every step, each with a separate call."""
    epoch_values: int = 0
    """Number of scalars averaged over the epoch and over the ranks."""
    callbacks: int = 0
    overriding: bool = False
    """Whether each of the callbacks overrides one hook, with an empty body."""
    accumulate: int = 1
    ranks: int = 1
    directory: Path = Path()


def build() -> nn.Sequential:
    """Return the model: four small parameter tensors, so that a step is mostly overhead."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))


class Batches:
    """A loader of prepared batches, so that loading costs nothing. (Lightning treats a list as several loaders.)"""

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
    """Return torch's AdamW with default arguments."""
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
    """Return the number of calls between the outermost ``fit`` and a frame; a direct call is 1."""
    depth, found, walked = 0, 0, frame.f_back
    while walked is not None:
        depth += 1
        # The function that runs a side, in this folder, is named `fit` too.
        if walked.f_code.co_name == "fit" and Path(walked.f_code.co_filename).parent.name != "benchmarks":
            found = depth
        walked = walked.f_back
    return found


class Screen(io.StringIO):
    """A terminal without a display, so that progress bars do their work and are not shown."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def unseen() -> Iterator[None]:
    """Send the output of a fit to a terminal without a display."""
    kept = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = Screen()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = kept
