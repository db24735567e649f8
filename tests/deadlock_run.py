"""One rank of a deadlock trial: a short fit with uneven data, in which random ranks raise signals at random points.

Everything is drawn from the trial's seed, so a seed repeats a trial.
"""

from __future__ import annotations

import faulthandler
import math
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from models import silent_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx import Trainer, TrainModule
from phalanx.callbacks import Callback, EarlyStopping, ModelCheckpoint
from phalanx.framework.core.accumulation import AccumulationSchedule
from phalanx.framework.core.errors import NonFiniteError, Preempted

STRATEGIES = ("ddp", "fsdp", "zero3", "zero2", "hsdp", "zero1")
POINTS = (
    *("fetch", "on_train_batch_start", "step", "on_before_backward", "on_before_optimizer_step", "on_train_batch_end"),
    *("on_validation_start", "validation", "on_validation_end", "on_train_epoch_start", "on_train_epoch_end"),
)
ACTS = ("stop", "stop", "continue", "end epoch", "trigger", "preempt", "none", "not a number", "bad batch", "slow")
_MOST_BATCHES = 6
_FEATURES = 6


@dataclass(frozen=True)
class Act:
    """An action of one rank at one point of a fit."""

    rank: int
    point: str
    at: int
    """The number of times that the rank has reached the point before."""
    what: str


@dataclass(frozen=True)
class Case:
    """A trial, drawn from its seed."""

    seed: int
    strategy: str
    ranks: int
    data: str
    """``shared``: one data set for all ranks; ``sized`` and ``stream``: each rank has data of its own."""
    batches: tuple[int, ...]
    """Batches of each rank in an epoch."""
    validation: tuple[int, ...]
    layers: str
    settings: dict[str, Any]
    windows: tuple[int, ...]
    saving: tuple[tuple[str, Any], ...]
    patience: int | None
    acts: tuple[Act, ...]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.strategy} on {self.ranks} ranks, {self.data} {self.batches}"


def drawn(seed: int, strategy: str | None = None, ranks: int | None = None) -> Case:
    """Return the trial of a seed, with a strategy and a number of ranks that it does not choose."""
    choice = random.Random(seed)
    strategy = strategy or STRATEGIES[seed % len(STRATEGIES)]
    drawn_ranks = choice.choice((2, 4) if strategy == "hsdp" else (2, 2, 3))
    ranks = ranks or drawn_ranks
    data = choice.choice(("shared", "sized", "stream"))
    settings: dict[str, Any] = {
        "max_epochs": choice.choice((1, 2, 3)),
        "max_steps": choice.choice((-1, -1, 5)),
        "min_steps": choice.choice((None, None, 3)),
        "limit_train_batches": choice.choice((None, None, 4)),
        "limit_val_batches": choice.choice((None, 2)),
        "num_sanity_val_steps": choice.choice((0, 1)),
        "log_every_n_steps": choice.choice((1, 3)),
        "nonfinite": choice.choice(("raise", "skip", "skip")),
        "gradient_clip_val": choice.choice((None, 1.0)),
        "val_check_interval": choice.choice((None, 2)),
    }
    if settings["val_check_interval"]:
        settings["check_val_every_n_epoch"] = choice.choice((1, None)) if data == "stream" else None
    return Case(
        seed,
        strategy,
        ranks,
        data,
        # A loader that is known to be empty is refused.
        _uneven(choice, ranks, least=int(data == "sized")),
        tuple(choice.randint(1, 3) for _ in range(ranks)),
        choice.choice(("plain", "plain", "buffers", "synchronized")),
        settings,
        choice.choice(((1,), (1,), (2,), (3,), (1, 2), (2, 1, 3))),
        choice.choice(
            (
                (),
                (("every_n_train_steps", 1), ("asynchronous", True)),
                (("every_n_train_steps", 2), ("asynchronous", True), ("save_last", True)),
                (("every_n_train_steps", 2), ("save_last", True)),
                (("every_n_epochs", 1), ("monitor", "val_loss")),
            )
        ),
        choice.choice((None, 1)),
        tuple(
            Act(choice.randrange(ranks), choice.choice(POINTS), choice.randint(0, 7), choice.choice(ACTS))
            for _ in range(choice.randint(1, 6))
        ),
    )


def _uneven(choice: random.Random, ranks: int, least: int) -> tuple[int, ...]:
    """Return numbers of batches, of which one is not 0."""
    counts = [choice.choice((least, choice.randint(1, _MOST_BATCHES), _MOST_BATCHES)) for _ in range(ranks)]
    some = choice.randrange(ranks)
    counts[some] = max(1, counts[some])
    return tuple(counts)


class Rows(Dataset[Tensor]):
    """Rows of random numbers."""

    def __init__(self, count: int, actor: Actor | None) -> None:
        self.rows = torch.randn(count, _FEATURES, generator=torch.Generator().manual_seed(count))
        self.actor = actor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if self.actor is not None and self.actor.reach("fetch") == "bad batch":
            return torch.full((_FEATURES,), math.nan)
        return self.rows[index]


class Stream(IterableDataset[Tensor]):
    """Rows of unknown number."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return (self.rows[index] for index in range(len(self.rows)))


def loader(case: Case, rank: int, counts: tuple[int, ...], actor: Actor | None) -> DataLoader[Tensor]:
    """Return a loader of ``counts`` batches of two rows for each rank, as the trial's kind of data."""
    if case.data == "shared":
        # Ranks get numbers of batches that differ by one at most.
        return DataLoader(Rows(max(1, 2 * sum(counts) - 1), actor), batch_size=2)
    rows = Rows(2 * counts[rank], actor)
    return DataLoader(Stream(rows) if case.data == "stream" else rows, batch_size=2)


class Actor(Callback):
    """Performs the acts of this rank; the trial calls ``reach`` at every point."""

    def __init__(self, case: Case, rank: int) -> None:
        self.acts = {(act.point, act.at): act.what for act in case.acts if act.rank == rank}
        self.reached = dict.fromkeys(POINTS, 0)
        self.saw = 0
        self.trainer: Trainer | None = None

    def reach(self, point: str) -> str:
        """Count a point, carry out what is due there, and return what the caller must do itself."""
        what = self.acts.get((point, self.reached[point]), "")
        self.reached[point] += 1
        trainer = self.trainer
        if what == "slow":
            time.sleep(0.05)
        elif trainer is None or not what:
            return ""
        elif what == "stop":
            trainer.request_stop(point)
        elif what == "continue":
            trainer.should_stop = False
        elif what == "trigger":
            trainer.raise_trigger("meet")
        elif what == "preempt":
            signal.raise_signal(signal.SIGTERM)
        return what

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.trainer = trainer

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> Any:
        return -1 if self.reach("on_train_batch_start") == "end epoch" else None

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.reach("on_before_backward")

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.reach("on_before_optimizer_step")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.reach("on_train_batch_end")
        if "meet" in trainer.fired_triggers:
            # As documented: all ranks see it at the same point, so all may call a collective.
            self.saw += int(trainer.world.all_reduce(torch.ones(())).item())

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.reach("on_train_epoch_start")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.reach("on_train_epoch_end")

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.reach("on_validation_start")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.reach("on_validation_end")


class Scaled(nn.Module):
    """Follows the scale of its input in a buffer, which some strategies broadcast in forward passes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, rows: Tensor) -> Tensor:
        if self.training:
            self.scale.lerp_(rows.detach().abs().mean(), 0.1)
        return rows / (1.0 + self.scale)


class Trained(TrainModule):
    """A small network that calls the actor in its steps."""

    def __init__(self, actor: Actor, layers: str) -> None:
        super().__init__()
        kinds: dict[str, list[nn.Module]] = {
            "plain": [],
            "buffers": [Scaled()],
            "synchronized": [nn.BatchNorm1d(8)],
        }
        middle = kinds[layers]
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(_FEATURES, 8), *middle, nn.Tanh(), nn.Linear(8, 1))
        self.actor = actor

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        what = self.actor.reach("step")
        if what == "none":
            return None
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss * math.nan if what == "not a number" else loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.actor.reach("validation")
        self.log("val_loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def run_case(case: Case, root: str, seconds: float) -> tuple[str, int, int]:
    """Run this rank of a trial; return how it ended, the optimizer steps, and the triggers it saw.

    All ranks must return the same. A rank that has not ended after ``seconds`` prints its stacks.
    """
    os.chdir(root)
    faulthandler.dump_traceback_later(seconds)
    try:
        return _run_case(case, root)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _run_case(case: Case, root: str) -> tuple[str, int, int]:
    rank = torch.distributed.get_rank()
    actor = Actor(case, rank)
    callbacks: list[Callback] = [actor]
    if case.saving:
        callbacks.append(ModelCheckpoint(dirpath=root, **dict(case.saving)))
    if case.patience is not None:
        callbacks.append(EarlyStopping("val_loss", patience=case.patience))
    trainer = silent_trainer(
        strategy=case.strategy,
        devices=case.ranks,
        default_root_dir=root,
        callbacks=callbacks,
        use_distributed_sampler=case.data == "shared",
        sync_batchnorm=case.layers == "synchronized",
        accumulate_grad_batches=case.windows[0] if len(case.windows) == 1 else AccumulationSchedule.cycle(case.windows),
        **{**case.settings, **({"enable_checkpointing": True} if case.saving else {})},
    )
    ended = "well"
    try:
        trainer.fit(
            Trained(actor, case.layers),
            loader(case, rank, case.batches, actor),
            loader(case, rank, case.validation, None),
        )
    except (Preempted, NonFiniteError) as error:
        ended = f"{type(error).__name__}: {error}"
    return ended, trainer.global_step, actor.saw
