"""Saving and loading about 200 MB of weights and AdamW state, beside writing the same bytes by hand and beside others.

Every round measures all sides in turn, in one process, in one directory; what counts are the ratios within a round.
Memory is warm: each side has saved once before it is timed, and what it wrote is deleted before the next.
"""

from __future__ import annotations

import gc
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .table import show

WIDTH = 1024
LAYERS = 16
REPLACE_EVERY = 5
ROWS = 32
Times = dict[str, float]


class Net(nn.Sequential):
    """16.8 M parameters: with two moments each, 201 MB."""

    def __init__(self, width: int) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(LAYERS)))


def batches(count: int, width: int) -> Any:
    """Return a loader of random batches [ROWS, width]."""
    return DataLoader(torch.randn(count * ROWS, width), batch_size=ROWS)  # type: ignore[arg-type]


def seconds(function: Callable[[], object]) -> float:
    """Time one call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def write_by_hand(path: Path, tensors: list[Tensor]) -> None:
    """Write the bytes of tensors into one file and sync it: the lower bound for any save."""
    with path.open("wb", buffering=0) as file:
        for tensor in tensors:
            memory: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
            file.write(memoryview(memory))
        os.fsync(file.fileno())


def read_by_hand(folder: Path) -> None:
    """Read all files of a folder into memory."""
    for path in sorted(folder.iterdir()):
        memory = bytearray(path.stat().st_size)
        with path.open("rb", buffering=0) as file:
            file.readinto(memory)


def synced(folder: Path) -> None:
    """Sync files that were written without a sync."""
    for path in [folder] if folder.is_file() else folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def phalanx_side(directory: Path, width: int) -> Times:
    """Save in a fit, synchronously and asynchronously; read it back; and do the same by hand, in the same round."""
    import phalanx
    from phalanx import Trainer, TrainModule

    found: Times = {}
    # An update waits for what is still being copied of its optimizer's state.
    arrived = [0.0]

    def arrive(*_: Any) -> None:
        arrived[0] = time.perf_counter()

    def leave(*_: Any) -> None:
        found["waited"] = time.perf_counter() - arrived[0]

    class Task(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(width)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer, path = self.trainer, directory / "phalanx.ckpt"
            if batch_idx == 0:
                trainer.save_checkpoint(path)
                trainer.optimizers[0].register_step_pre_hook(arrive)
                trainer.save_checkpoint(path, asynchronous=True)
                trainer.optimizers[0].register_step_pre_hook(leave)
                trainer.finish_saves()
                read_all(path)
                shutil.rmtree(path)
                return
            if batch_idx == 2:
                found["blocked"] = found["called"] + found["waited"]
                found["behind"] = time.perf_counter() - found.pop("began") + seconds(trainer.finish_saves)
                return
            state = trainer.optimizers[0].state
            tensors = [value for slots in state.values() for value in slots.values() if value.dim()]
            write_by_hand(directory / "warm", [*self.parameters(), *tensors])
            (directory / "warm").unlink()
            found["by hand"] = seconds(lambda: write_by_hand(directory / "hand", [*self.parameters(), *tensors]))
            (directory / "hand").unlink()
            found["phalanx"] = seconds(lambda: trainer.save_checkpoint(path))
            # Fill the page cache, which lacks files written with direct writes, so that neither side reads the disk.
            read_by_hand(path)
            found["read by hand"] = seconds(lambda: read_by_hand(path))
            found["read"] = seconds(lambda: read_all(path))
            shutil.rmtree(path)
            found["began"] = time.perf_counter()
            found["called"] = seconds(lambda: trainer.save_checkpoint(path, asynchronous=True))

    def read_all(path: Path) -> None:
        opened = phalanx.checkpoint.open_checkpoint(path)
        for section in opened.sections:
            opened.read_section(section)

    trainer = Trainer(max_epochs=1, accelerator="cpu", barebones=True, default_root_dir=directory)
    trainer.fit(Task(), batches(3, width))
    return found


def replacing_side(directory: Path, width: int) -> Times:
    """Save with ``save_top_k=1`` every few steps, where every save replaces the previous one; and the same by hand."""
    from phalanx import Trainer, TrainModule
    from phalanx.callbacks import ModelCheckpoint

    blocked: list[float] = []
    by_hand: list[float] = []
    unlinked: list[float] = []
    paths = [directory / "hand-0", directory / "hand-1"]

    class Timed(ModelCheckpoint):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            spent = seconds(lambda: super(Timed, self).on_train_batch_end(trainer, module, outputs, batch, batch_idx))
            if trainer.global_step % REPLACE_EVERY == 0:
                blocked.append(spent)

    class Task(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            # 12.6 M parameters: with two moments each, 151 MB.
            self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(3 * LAYERS // 4)))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.trainer.global_step % REPLACE_EVERY != 2:
                return
            # Between two saves, so that neither side deletes while the other writes.
            state = self.trainer.optimizers[0].state
            tensors = [value for slots in state.values() for value in slots.values() if value.dim()]
            by_hand.append(seconds(lambda: write_by_hand(paths[1], [*self.parameters(), *tensors])))
            if paths[0].exists():
                unlinked.append(seconds(paths[0].unlink))
            paths.reverse()

    saver = Timed(directory / "kept", every_n_train_steps=REPLACE_EVERY, save_top_k=1)
    steps = REPLACE_EVERY * 4
    trainer = Trainer(
        max_steps=steps,
        accelerator="cpu",
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(Task(), batches(steps, width))
    # The first save replaces no checkpoint, and touches memory for the first time.
    return {
        "top_k=1": statistics.median(blocked[1:]),
        "top_k=1 by hand": statistics.median(by_hand[1:]),
        "top_k=1, unlink by hand": statistics.median(unlinked),
    }


def lightning_side(directory: Path, width: int) -> Times:
    """Save in a fit of Lightning."""
    import lightning

    found: Times = {}

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(width)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            path = directory / "lightning.ckpt"
            found["lightning"] = seconds(lambda: self.trainer.save_checkpoint(path))
            found["lightning, synced"] = found["lightning"] + seconds(lambda: synced(path))
            path.unlink()

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(Task(), batches(2, width))
    return found


def accelerate_side(directory: Path, width: int) -> Times:
    """Save the state of an Accelerator."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    net = Net(width)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    found: Times = {}
    for batch in batches(2, width):
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        path = directory / "accelerate"
        found["accelerate"] = seconds(lambda path=path: accelerator.save_state(str(path)))  # type: ignore[misc]
        found["accelerate, synced"] = found["accelerate"] + seconds(lambda path=path: synced(path))  # type: ignore[misc]
        shutil.rmtree(path)
    accelerator.free_memory()
    return found


SIDES = (phalanx_side, replacing_side, lightning_side, accelerate_side)
# Pairs of measurements to compare, and the limit of their ratio.
RATIOS = (
    ("a save over writing and syncing by hand", "phalanx", "by hand", "1.5"),
    ("a save over Lightning's", "phalanx", "lightning", "1"),
    ("a save over Lightning's, synced", "phalanx", "lightning, synced", "1"),
    ("a save over Accelerate's", "phalanx", "accelerate", "1"),
    ("a save over Accelerate's, synced", "phalanx", "accelerate, synced", "1"),
    ("blocked by an asynchronous save, over a save", "blocked", "phalanx", "0.1"),
    (
        "a save with save_top_k=1 that replaces another, over writing and syncing by hand",
        "top_k=1",
        "top_k=1 by hand",
        "1.5",
    ),
    ("loading with verification over reading the bytes", "read", "read by hand", "2"),
)


def checkpoints(rounds: int, quick: bool) -> None:
    """Print medians over the rounds, and medians of the ratios within each."""
    measured: list[Times] = []
    for _ in range(rounds + 1):
        found: Times = {}
        for side in SIDES:
            with TemporaryDirectory() as directory:
                found |= side(Path(directory), WIDTH // 4 if quick else WIDTH)
            gc.collect()
        measured.append(found)
    # The first round imports and touches memory for the first time.
    measured = measured[1:]
    rows = [[name, *spread([found[name] * 1e3 for found in measured])] for name in measured[0]]
    size = 12 * sum(p.numel() for p in Net(WIDTH // 4 if quick else WIDTH).parameters()) / 1e6
    show(f"Checkpoints of {size:.0f} MB, one process, ms", ("", "median", "least", "most"), rows)
    ratios = []
    for what, one, other, bar in RATIOS:
        values = [found[one] / found[other] for found in measured]
        ratios.append([what, *(f"{value:.3f}" for value in spread(values)), bar])
    show("Ratios within a round", ("", "median", "least", "most", "bar"), ratios)


def spread(values: list[float]) -> tuple[float, float, float]:
    """Return the median, the least and the most."""
    return statistics.median(values), min(values), max(values)
