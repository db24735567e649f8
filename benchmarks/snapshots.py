"""The cost of snapshots in memory: the time of a step with them beside a step without, in one alternating run.

``python -m benchmarks.snapshots WIDTH LAYERS SNAPSHOTS STEPS`` is one fit, whose ranks phalanx starts.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Callback, Trainer, TrainModule

from .tables import Table, results

# The width and the number of layers, the steps of a fit, and the settings that are measured beside none.
MODELS = {"1 M": (512, 4, 1500, ("auto", "100")), "100 M": (2048, 24, 40, ("auto", "20"))}
_TIMEOUT_SECONDS = 600
ROWS = 64
# The interval of snapshots="auto" is found in the first part.
SETTLING = 0.4


def snapshots(rounds: int, quick: bool) -> Iterator[Table]:
    """The medians over the rounds, and the medians of the ratios within each."""
    rows: list[list[object]] = []
    for name, (width, layers, steps, settings) in MODELS.items():
        if quick:
            width, steps = width // 4, steps // 2
        found: dict[str, list[float]] = {each: [] for each in ("none", *settings)}
        for _ in range(min(rounds, 5)):
            for setting, times in found.items():
                times.append(_milliseconds(width, layers, setting, steps))
        base = found.pop("none")
        rows.append([f"{name}, none", statistics.median(base), "baseline"])
        for setting, times in found.items():
            share = statistics.median(one / other - 1 for one, other in zip(times, base, strict=True))
            title = f"{name}, `{setting!r}`" if setting == "auto" else f"{name}, every {setting} steps"
            rows.append([title, statistics.median(times), f"{share:+.1%}"])
    yield Table(
        "snapshots in memory", ["parameters, snapshots", "time per step in ms", "change in time per step"], rows
    )


def _milliseconds(width: int, layers: int, setting: str, steps: int) -> float:
    given = (str(width), str(layers), setting, str(steps))
    (found,) = results("benchmarks.snapshots", *given, seconds=_TIMEOUT_SECONDS)
    return float(found)


class Net(TrainModule):
    """Linear layers of one width, with AdamW: a snapshot has three numbers for each parameter."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(Callback):
    """Takes the time after each step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter())


def main() -> None:
    """Train, and print the mean time of a step after the first ones, in milliseconds."""
    width, layers, steps = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    setting = sys.argv[3]
    given: int | str | bool = int(setting) if setting.isdigit() else setting == "auto" and setting
    torch.set_num_threads(1)
    clock = Clock()
    with TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", max_steps=steps, snapshots=given, max_restarts=1, callbacks=clock, barebones=False,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            enable_report=False, verbose=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(Net(width, layers), DataLoader(torch.randn(ROWS * steps, width), ROWS))  # type: ignore[arg-type]
    first = int(SETTLING * steps)
    milliseconds = (clock.times[-1] - clock.times[first]) / (len(clock.times) - 1 - first) * 1e3
    print("RESULT", json.dumps(milliseconds))


if __name__ == "__main__":
    main()
