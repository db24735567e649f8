"""What tests of logging share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from phalanx import Callback, Trainer, TrainModule


class Interrupt(Callback):
    """Saves a checkpoint after a batch of the second epoch."""

    def __init__(self, path: Path, at: int) -> None:
        self.path = path
        self.at = at

    def on_train_batch_end(self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, index: int) -> None:
        if trainer.current_epoch == 1 and index == self.at:
            trainer.save_checkpoint(self.path)


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """Collect the names of the collectives that are called."""
    calls: list[str] = []
    kept = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast", "barrier", "gather")}

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    for name, function in kept.items():
        setattr(dist, name, counting(name, function))
    try:
        yield calls
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)


KINDS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def metrics_of(trainer: Any) -> dict[str, dict[str, float]]:
    """Return all metrics of a Trainer, by where they are shown."""
    return {kind: numbers(getattr(trainer, kind)) for kind in KINDS}


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """Return metrics as floats."""
    return {name: float(value) for name, value in metrics.items()}
