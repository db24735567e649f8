"""The process that measures saves: how long training waits, for checkpoints of several sizes."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from phalanx import Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint

from .child import Parent
from .device import Device

_SAVED_AT, _STEPS, _WARM = 20, 39, 5
_GIGABYTES, _TINY_GIGABYTES = (1.0, 5.0, 20.0), (0.001,)
_SLOW_GIGABYTES = 5.0
"""The largest size that is also saved without overlap."""


def affordable(gigabytes: float, disk_bytes: float, meminfo: str) -> str:
    """Return the reason why a size cannot be saved here; empty if it can.

    The disk holds one checkpoint. The host's memory holds its copy, and pages that are not written yet.

    Args:
        meminfo: the text of ``/proc/meminfo``.
    """
    line = next(line for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
    memory_bytes, needed = int(line.split()[1]) * 1024, gigabytes * 1e9
    if 1.2 * needed > disk_bytes:
        return f"the disk has {disk_bytes / 1e9:.0f} GB free"
    if 2.5 * needed > memory_bytes:
        return f"the host has {memory_bytes / 1e9:.0f} GB of memory available"
    return ""


class Layers(TrainModule):
    """Square linear layers whose weights and Adam's state take a number of bytes. Records the time of each step."""

    def __init__(self, gigabytes: float, device: Device) -> None:
        super().__init__()
        width = 4096 if gigabytes >= 1 else 128
        count = max(1, round(gigabytes * 1e9 / (12 * width**2)))
        with device.torch:
            self.layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
            self.inputs = torch.randn(64, width)
        self.device_of_fit = device
        self.marks: list[float] = []

    def mark(self) -> None:
        """Record the time at which the device has finished the steps before; copies on other streams may continue."""
        if self.device_of_fit.is_cuda:
            torch.cuda.current_stream().synchronize()
        self.marks.append(time.perf_counter())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return a loss."""
        self.mark()
        loss: Tensor = self.layers(self.inputs).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the fused AdamW."""
        return torch.optim.AdamW(self.layers.parameters(), lr=1e-5, fused=True)


def with_trainer(asynchronous: bool, module: Layers, folder: Path) -> None:
    """Fit with a save in the middle."""
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=_SAVED_AT, asynchronous=asynchronous)
    trainer = Trainer(
        accelerator=module.device_of_fit.kind,
        devices=1,
        strategy="single",
        max_steps=_STEPS,
        callbacks=[saver],
        logger=False,
        verbose=False,
        default_root_dir=folder,
    )
    trainer.fit(module, [torch.zeros(1)] * _STEPS)
    module.mark()


def by_hand(module: Layers, folder: Path) -> None:
    """Run the loop in plain torch, with ``torch.save`` in the middle."""
    optimizer = module.configure_optimizers()
    for index in range(_STEPS):
        module.training_step(torch.zeros(1), index).backward()
        optimizer.step()
        optimizer.zero_grad()
        if index + 1 == _SAVED_AT:
            with (folder / "checkpoint.pt").open("wb") as file:
                torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
                file.flush()
                os.fsync(file.fileno())
    module.mark()


_WAYS: dict[str, Callable[[Layers, Path], None]] = {
    "phalanx, asynchronous": lambda module, folder: with_trainer(True, module, folder),
    "phalanx": lambda module, folder: with_trainer(False, module, folder),
    "torch.save and fsync": by_hand,
}


def stall(marks: Sequence[float]) -> dict[str, float]:
    """Return how much longer the steps after the save took than those before it, and the time until the end.

    Args:
        marks: the seconds at the start of each step, and those at the end of the fit.
    """
    lengths = [after - before for before, after in pairwise(marks)]
    usual = statistics.median(lengths[_WARM : _SAVED_AT - 1])
    # The save is within the step that it follows. The time after the last step is not training.
    later = lengths[_SAVED_AT - 1 : _STEPS - 1]
    return {
        "step_ms": usual * 1e3,
        "stall_ms": sum(length - usual for length in later) * 1e3,
        "longest_ms": (max(later) - usual) * 1e3,
        "until_written": marks[-1] - marks[_SAVED_AT - 1],
    }


def main() -> None:
    parent, given = Parent(), json.loads(sys.argv[1])
    device, folder = Device(given["device"]), Path(given["folder"]) / "checkpoints"
    sizes = _TINY_GIGABYTES if given["tiny"] else _GIGABYTES[:1] if given["quick"] else _GIGABYTES
    ways = [(size, way) for way in _WAYS for size in sizes if way.endswith("asynchronous") or size <= _SLOW_GIGABYTES]
    for gigabytes, way in ways:
        folder.mkdir()
        problem = affordable(gigabytes, shutil.disk_usage(folder).free, Path("/proc/meminfo").read_text())
        result: dict[str, Any] = {"way": way, "gigabytes": gigabytes, "problem": problem}
        try:
            if not problem:
                module = Layers(gigabytes, device)
                _WAYS[way](module, folder)
                result |= stall(module.marks)
        except Exception as error:
            result["problem"] = f"{type(error).__name__}: {error}"
        shutil.rmtree(folder)
        device.free_cache()
        parent.send(result)


if __name__ == "__main__":
    main()
