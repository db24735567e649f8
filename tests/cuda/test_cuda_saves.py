"""Asynchronous saves of large state while training: what they hold, and how long a step waits for them."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from cuda_machine import EMULATED
from cuda_plugin import Measured
from emulated_fits import SaveAt, assert_same_checkpoints, batches, emulated_trainer
from ranks import run_on_ranks
from torch import nn

from phalanx import TrainModule

# Parameters: 32 MiB or 1 GiB of float32; with Adam's state three times as much.
WIDTH, LAYERS = (1024, 8) if EMULATED else (8192, 4)
STEPS = 10


class Large(TrainModule):
    """Wide layers. Notes when each step began, after all work before it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(3)
            self.first = nn.Linear(16, WIDTH)
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.begins: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss of a linear model."""
        torch.cuda.synchronize()
        self.begins.append(time.perf_counter())
        return self.layers(self.first(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        """Return fused AdamW, which keeps two moments."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def saved(root: str, asynchronous: bool) -> dict[str, Any]:
    """Save after steps 3, 6 and 9; return the seconds of each step, and of the fit, and bytes of pinned memory."""
    module = Large()
    trainer = emulated_trainer(
        1,
        max_steps=STEPS,
        callbacks=[SaveAt(root, asynchronous)],
        default_root_dir=root,
        enable_checkpointing=None,
    )
    began = time.perf_counter()
    trainer.fit(module, batches(STEPS + 2))
    ended = time.perf_counter()
    times = [*module.begins, ended]
    pinned = torch.cuda.host_memory_stats()
    return {
        "steps": [later - earlier for earlier, later in itertools.pairwise(times)],
        "seconds": ended - began,
        "state": 3 * sum(parameter.nbytes for parameter in module.parameters()),
        "pinned": {name: value for name, value in pinned.items() if name.startswith("allocated_bytes")},
    }


@pytest.mark.alone
@pytest.mark.timeout(200)
def test_a_large_save_on_a_thread_holds_what_a_save_at_once_holds(tmp_path: Path, measured: Measured) -> None:
    for way in ("asynchronous", "at_once"):
        (found,) = run_on_ranks(1, saved, str(tmp_path / way), way == "asynchronous", device="cuda", timeout=90.0)
        usual = median(found["steps"][1:2] + found["steps"][4:5])
        # The step in which a save begins, and the one whose update may wait for copies. The first also reserves memory.
        for number, step in enumerate((2, 5), 1):
            stall = sum(found["steps"][step : step + 2]) - 2 * usual
            measured(f"stall of save {number}, {way}", 1e3 * stall, "ms")
        measured(f"step without a save, {way}", 1e3 * usual, "ms")
        measured(f"fit with 3 saves, {way}", found["seconds"], "s")
        for name, value in found["pinned"].items():
            measured(f"torch's pinned memory, {way}, {name}", value / 2**20, "MiB")
    measured("state of one save", found["state"] / 2**20, "MiB")
    for step in (3, 9):
        assert_same_checkpoints(*(tmp_path / way / f"step={step}.ckpt" for way in ("asynchronous", "at_once")))
