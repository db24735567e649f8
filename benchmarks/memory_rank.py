"""One rank of a fit whose memory is measured: prints its peak. Run by ``memory.py``."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, TrainModule

SILENT: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
WARM_UPDATES = 2


class Model(TrainModule):
    """Blocks of two wide layers, and an embedding that is tied to the output layer."""

    def __init__(self, width: int, blocks: int, rows: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        )
        self.head = nn.Linear(width, rows, bias=False)
        self.head.weight = self.embedding.weight
        self.held: dict[str, int] = {}
        self.before = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        hidden = self.embedding(batch[0])
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), batch[0].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_after_backward(self) -> None:
        self.measure()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.measure()

    def measure(self) -> None:
        """Record what is held, once the optimizer has its state."""
        if self.global_step >= WARM_UPDATES:
            found = {
                "tensors": live_bytes(),
                "resident": resident_bytes() - self.before,
                "on_disk": swapped_bytes() // self.trainer.world_size,
            }
            if found["tensors"] > self.held.get("tensors", 0):
                self.held = found


def live_bytes() -> int:
    """Return the bytes of all tensors in this process that Python can reach. Shared storages count once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for found in gc.get_objects():
        if not issubclass(type(found), Tensor):
            continue
        for tensor in (found, found.grad if found.is_leaf else None):
            local = getattr(tensor, "_local_tensor", tensor)
            if local is not None and local.device.type == "cpu":
                storage = local.untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def resident_bytes() -> int:
    """Return this process's resident memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def swapped_bytes() -> int:
    """Return the bytes of all files in the folder for offloading."""
    folder = Path(os.environ["PHALANX_NVME_PATH"])
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def fit(name: str, precision: str, window: int, shape: tuple[int, int, int]) -> Model:
    """Train for three optimizer steps of ``window`` micro-batches each."""
    before, tensors = resident_bytes(), live_bytes()
    module = Model(*shape)
    module.before = before
    loader = DataLoader(TensorDataset(torch.randint(0, shape[2], (64, 4))), batch_size=2)
    trainer = Trainer(
        strategy=name,
        precision=precision,
        devices="auto",
        max_steps=WARM_UPDATES + 1,
        accumulate_grad_batches=window,
        **SILENT,
    )
    trainer.fit(module, loader)
    module.held["tensors"] -= tensors
    return module


def main() -> None:
    name, precision, window, shape = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    fit(name, precision, window, (8, 2, 16))  # excludes libraries and caches that are loaded once
    module = fit(name, precision, window, shape)
    # In one write, because the ranks share a pipe.
    print(f"RESULT {json.dumps(module.held)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
