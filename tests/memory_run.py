"""One fit of ``memory_trials.py``, as its ranks run it.

As a script, ``memory_run.py ROOT SEED STRATEGY SIZE``, it writes the result of rank 0 to ``ROOT/result.json``.
"""

from __future__ import annotations

import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from exhausted import EVERY, LAYERS, PLACES, Exhausted, strategy_of
from models import regression_data, silent_trainer, weights_of
from torch.utils.data import DataLoader

from phalanx import Callback


@dataclass(frozen=True)
class Trial:
    """A fit of which one rank runs out of memory."""

    seed: int
    strategy: str
    ranks: int
    place: str
    rank: int
    at: int
    largest: int
    global_batch: int
    layer: int

    def __str__(self) -> str:
        rank = "all ranks" if self.rank == EVERY else f"rank {self.rank}"
        return (
            f"seed {self.seed:3}: {self.strategy:5} on {self.ranks}, {self.place} of {rank}, layer "
            f"{self.layer}, after pass {self.at}, above {self.largest} of {self.global_batch} samples"
        )


class _Curve(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.values.append(float(trainer.callback_metrics["loss_epoch"]))

    monitors = True

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = [*state_dict["values"]]


class _OnceInAll(Exhausted):
    """Runs out of memory in one update of all attempts, however often its ranks are started."""

    def __init__(self, root: Path, trial: Trial, rank: int) -> None:
        self.told = root / "raised"
        passes = trial.place != "update" or not self.told.exists()
        super().__init__(trial.place, rank if passes else -1, trial.largest, trial.at, layer=trial.layer)

    def raise_error(self, *_: Any) -> None:
        self.told.touch()
        super().raise_error()


def drawn(seed: int, strategy: str) -> Trial:
    """Return the trial of a seed under a strategy."""
    draw = random.Random(f"{strategy} {seed}")
    ranks = {"single": 1, "hsdp": 4}.get(strategy) or draw.choice([2, 2, 3])
    global_batch = draw.choice([7, 16, 30])
    return Trial(
        seed,
        strategy,
        ranks,
        PLACES[seed % len(PLACES)],
        draw.choice([*range(ranks), EVERY]),
        draw.randrange(5),
        # Less than the smallest part of a rank, so that memory is short in every trial.
        draw.randint(1, max(1, global_batch // ranks - 1)),
        global_batch,
        draw.randrange(LAYERS),
    )


def fitted(trial: Trial, micro: int | str, root: Path | None = None) -> tuple[list[float], torch.Tensor, int, int]:
    """Return the losses of the epochs, the weights, the optimizer steps and the errors raised on this rank.

    With ``root``, a folder for records, the ranks may be started again.
    """
    torch.manual_seed(trial.seed)
    raises = micro == "auto"
    rank = trial.rank if raises else -1
    if root is not None:
        module: Exhausted = _OnceInAll(root, trial, rank)
    else:
        module = Exhausted(trial.place, rank, trial.largest, trial.at, layer=trial.layer)
    curve = _Curve()
    trainer = silent_trainer(
        max_epochs=2,
        devices=trial.ranks,
        strategy=strategy_of(trial.strategy),
        global_batch_size=trial.global_batch,
        micro_batch_size=micro,
        callbacks=curve,
        verbose=False,
    )
    trainer.fit(module, DataLoader(regression_data(64), batch_size=4, shuffle=True))
    return curve.values, weights_of(module), trainer.global_step, module.raised


def main() -> None:
    """Run one fit as a script, whose ranks are started again."""
    root, micro = Path(sys.argv[1]), sys.argv[4]
    trial = drawn(int(sys.argv[2]), sys.argv[3])
    losses, weights, steps, _ = fitted(trial, micro if micro == "auto" else int(micro), root)
    if os.environ["RANK"] == "0":
        (root / "result.json").write_text(json.dumps([losses, weights.tolist(), steps]))


if __name__ == "__main__":
    main()
