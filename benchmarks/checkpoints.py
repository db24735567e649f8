"""Saving and loading 201 MB of weights and AdamW state, beside writing the same bytes by hand and beside others.

Every round measures all sides in turn, in one process, in one directory; what counts are the ratios within a round.
Memory is warm: each side has saved once before it is timed, and what it wrote is deleted before the next.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from .sides import missing, unseen
from .tables import Table

WIDTH, LAYERS, ROWS = 1024, 16, 32
Times = dict[str, float]


def seconds(function: Callable[[], object]) -> float:
    """Time one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


class ByHand:
    """Writes and reads tensors as they are, and syncs them: the lower bound of any checkpoint."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        slots = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        self._tensors: list[Tensor] = [*(each for group in optimizer.param_groups for each in group["params"]), *slots]

    def save(self, path: Path) -> None:
        """Write one file."""
        with path.open("wb", buffering=0) as file:
            for tensor in self._tensors:
                memory: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
                file.write(memoryview(memory))
            os.fsync(file.fileno())

    @staticmethod
    def read(folder: Path) -> None:
        """Read all files of a folder into memory."""
        for path in sorted(folder.iterdir()):
            memory = bytearray(path.stat().st_size)
            with path.open("rb", buffering=0) as file:
                file.readinto(memory)


def synced(path: Path) -> None:
    """Sync what was written without a sync."""
    for each in [path] if path.is_file() else path.iterdir():
        with each.open("rb") as file:
            os.fsync(file.fileno())


def with_trainer(kind: str, directory: Path, width: int, visit: Callable[[Any], None]) -> None:
    """Fit two steps with a Trainer of phalanx or Lightning, and call ``visit`` with it after each."""
    library: Any = import_module("phalanx" if kind == "phalanx" else "lightning.pytorch")

    class Task(library.TrainModule if kind == "phalanx" else library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = _net(width)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            visit(self.trainer)

    trainer = library.Trainer(max_epochs=1, accelerator="cpu", devices=1, barebones=True, default_root_dir=directory)
    trainer.fit(Task(), torch.utils.data.DataLoader(torch.randn(2 * ROWS, width), ROWS))  # type: ignore[arg-type]


def _net(width: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def phalanx_side(directory: Path, width: int) -> Times:
    """Save, asynchronously and not, read it back, and do the same by hand; the second of the two steps counts."""
    found: Times = {}
    open_checkpoint = import_module("phalanx").checkpoint.open_checkpoint

    def read_all(path: Path) -> None:
        opened = open_checkpoint(path)
        for section in opened.sections:
            opened.read_section(section)

    def visit(trainer: Any) -> None:
        path, optimizer = directory / "phalanx.ckpt", trainer.optimizers[0]
        hand = ByHand(optimizer)
        found["by hand"] = seconds(lambda: hand.save(directory / "hand"))
        (directory / "hand").unlink()
        found["phalanx"] = seconds(lambda: trainer.save_checkpoint(path))
        # Fill the page cache, which lacks files written with direct writes, so that neither side reads the disk.
        hand.read(path)
        found["read by hand"] = seconds(lambda: hand.read(path))
        found["read by phalanx, verified"] = seconds(lambda: read_all(path))
        shutil.rmtree(path)
        found["called"] = seconds(lambda: trainer.save_checkpoint(path, asynchronous=True))
        # The next update waits for what is still being copied of its optimizer's state.
        found["waited"] = seconds(optimizer.step)
        found["asynchronous, until written"] = found["called"] + found["waited"] + seconds(trainer.finish_saves)
        found["phalanx, asynchronous"] = found.pop("called") + found.pop("waited") - seconds(optimizer.step)
        shutil.rmtree(path)

    with_trainer("phalanx", directory, width, visit)
    return found


def lightning_side(directory: Path, width: int) -> Times:
    """Save in a fit of Lightning."""
    found: Times = {}

    def visit(trainer: Any) -> None:
        path = directory / "lightning.ckpt"
        found["Lightning"] = seconds(lambda: trainer.save_checkpoint(path))
        found["Lightning, synced"] = found["Lightning"] + seconds(lambda: synced(path))
        path.unlink()

    with_trainer("lightning", directory, width, visit)
    return found


def accelerate_side(directory: Path, width: int) -> Times:
    """Save the state of an Accelerator."""
    accelerator = import_module("accelerate").Accelerator(cpu=True)
    net = _net(width)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    found: Times = {}
    path = directory / "accelerate"
    for _ in range(2):
        accelerator.backward(model(torch.randn(ROWS, width)).square().mean())
        optimizer.step()
        found["Accelerate"] = seconds(lambda: accelerator.save_state(str(path)))
        found["Accelerate, synced"] = found["Accelerate"] + seconds(lambda: synced(path))
        shutil.rmtree(path)
    accelerator.free_memory()
    return found


_SIDES = {"raw": phalanx_side, "Lightning": lightning_side, "Accelerate": accelerate_side}
_BASES = {"read by phalanx, verified": "read by hand", "read by hand": "read by hand"}


def checkpoints(rounds: int, quick: bool) -> Iterator[Table]:
    """The medians over the rounds, and the medians of the ratios within each."""
    width, measured = WIDTH // 4 if quick else WIDTH, list[Times]()
    for _ in range(rounds + 1):
        found: Times = {}
        for name, side in _SIDES.items():
            if not missing(name):
                with TemporaryDirectory() as directory, unseen():
                    found |= side(Path(directory), width)
        measured.append(found)
    # The first round imports and touches memory for the first time.
    del measured[0]
    rows = []
    for name in measured[0]:
        ratios = [found[name] / found[_BASES.get(name, "by hand")] for found in measured]
        rows.append(
            [name, statistics.median(found[name] for found in measured) * 1e3, f"{statistics.median(ratios):.2f}"]
        )
    yield Table("checkpoints of 201 MB", ["", "ms", "over writing or reading by hand"], rows)
