"""The bytes that each of two ranks holds under every strategy, beside the formulas. Run as a module it is one rank."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, TrainModule
from phalanx.framework.core.precision import resolve_precision
from phalanx.framework.memory.formulas import Footprint, Ranks, footprint
from phalanx.framework.memory.measure import size_of
from phalanx.framework.memory.memory_plan import counted_layouts

from .tables import Table, results

RANKS, WARM_UPDATES = 2, 2
SHAPE, SHORT_SHAPE = (512, 9, 2048), (128, 9, 512)
_HEAD = ("", "formula, MB", "tensors", "over it, %", "formula with buckets", "resident", "formula on disk", "on disk")


def memory(rounds: int, quick: bool) -> Iterator[Table]:
    """Measure each strategy in new processes, once, as bytes do not vary."""
    shape = SHORT_SHAPE if quick else SHAPE
    size = replace(size_of(Model(*shape)), state_slots=2.0)
    for precision in ("32-true", "bf16-mixed"):
        for window in (1,) if quick else (1, 4):
            rows: list[list[object]] = []
            for name, layout in counted_layouts().items():
                ranks = Ranks(1 if name == "single" else RANKS)
                held = _measured(name, precision, window, shape, ranks.world_size)
                needs = footprint(layout, size, ranks, resolve_precision(precision), accumulates=window > 1)
                rows.append([name, *_cells(held, needs)])
            yield Table(f"memory in {precision} and windows of {window}", _HEAD, rows)


def _cells(held: dict[str, int], needs: Footprint) -> list[object]:
    """Return the cells of a row. Buffers of a disk are permanent and count as held; others are temporary, or small."""
    in_memory = needs.device.held + needs.host.held + needs.host.buckets
    tensors, resident, on_disk = (held[name] / 1e6 if held else "-" for name in ("tensors", "resident", "on_disk"))
    over = f"{100 * (held['tensors'] / in_memory - 1):+.1f}" if held and in_memory else "-"
    formulas = (in_memory / 1e6, (in_memory + needs.device.buckets) / 1e6, needs.disk.held / 1e6)
    return [formulas[0], tensors, over, formulas[1], resident, formulas[2], on_disk]


def _measured(name: str, precision: str, window: int, shape: tuple[int, int, int], ranks: int) -> dict[str, int]:
    """Run a fit under torchrun; return the bytes of the rank that held most; nothing if it failed."""
    # Next to this file, because a temporary directory may be in memory, which DeepSpeed cannot swap to.
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent, prefix=".swapped-") as folder:
        variables = {
            # DeepSpeed's builds would not find the ninja of a virtual environment that is not activated.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
            "PHALANX_NVME_PATH": folder,
            # Return freed memory to the system, so that resident memory shows what is held.
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        }
        arguments = name, precision, str(window), json.dumps(shape)
        found = results("benchmarks.memory", *arguments, ranks=ranks, variables=variables)
    return max(found, key=lambda rank: int(rank["tensors"]), default={})


# ---- in a rank -------------------------------------------------------------------------------------------------------


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
        self.before = resident_bytes()

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
        if self.global_step >= WARM_UPDATES and (tensors := live_bytes()) > self.held.get("tensors", 0):
            folder = Path(os.environ["PHALANX_NVME_PATH"])
            on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            resident = resident_bytes() - self.before
            self.held = {"tensors": tensors, "resident": resident, "on_disk": on_disk // self.trainer.world_size}


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
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fit(name: str, precision: str, window: int, shape: tuple[int, int, int]) -> dict[str, int]:
    """Train for three optimizer steps of ``window`` micro-batches each; return what was held."""
    before, tensors = resident_bytes(), live_bytes()
    module = Model(*shape)
    module.before = before
    silent: Any = {"logger": False, "verbose": False, "enable_checkpointing": False}
    trainer = Trainer(
        accelerator="cpu",
        strategy=name,
        precision=precision,
        devices="auto",
        max_steps=WARM_UPDATES + 1,
        accumulate_grad_batches=window,
        **silent,
    )
    trainer.fit(module, DataLoader(TensorDataset(torch.randint(0, shape[2], (64, 4))), batch_size=2))
    return module.held | {"tensors": module.held["tensors"] - tensors}


def main() -> None:
    name, precision, window, shape = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    torch.set_num_threads(1)
    fit(name, precision, window, (8, 2, 16))  # excludes libraries and caches that are loaded once
    # In one write, because the ranks share a pipe.
    print(f"RESULT {json.dumps(fit(name, precision, window, shape))}\n", end="", flush=True)


if __name__ == "__main__":
    main()
