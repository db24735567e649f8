"""Random single-bit flips over the files of a checkpoint that two ranks wrote: none may be taken for good.

    python tests/bit_flips.py --flips 1000

Each flip is put to ``verify``, to ``load``, and to reading every tensor of every section. The checkpoint is one of a
real fit: weights, an optimizer's moments, schedulers and callbacks, random generators, all split over two ranks.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from hostile import read_all
from models import Regressor, loader, silent_trainer
from ranks import close_pools, run_on_ranks

from phalanx import checkpoint
from phalanx.callbacks import Callback
from phalanx.framework.core.errors import CheckpointError


class Saves(Callback):
    """Saves at the end, and has state of its own to save."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)

    def state_dict(self) -> dict[str, Any]:
        return {"table": torch.arange(1000.0), "bytes": b"x" * 5000, "notes": {"a": [1, 2.5, None]}}


def fit(path: str, strategy: str) -> None:
    """Train a few updates on this rank and save."""
    trainer = silent_trainer(strategy=strategy, devices=2, max_steps=3, callbacks=[Saves(Path(path))])
    trainer.fit(Regressor(), loader(32))


def saved(folder: Path, strategy: str = "fsdp") -> Path:
    """Return a checkpoint that two ranks wrote."""
    path = folder / "a.ckpt"
    run_on_ranks(2, fit, str(path), strategy)
    assert {"model-00001.safetensors", "optimizer-00001.safetensors"} <= {file.name for file in path.iterdir()}
    return path


def accepted(reader: Callable[[Path], object], path: Path) -> bool:
    """Whether a reader takes a checkpoint for good."""
    try:
        return not reader(path) if reader is checkpoint.verify else reader(path) is not CheckpointError
    except CheckpointError:
        return False


READERS: tuple[Callable[[Path], object], ...] = (checkpoint.verify, checkpoint.load, read_all)


def flip(path: Path, flips: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Flip bits one at a time; return flips by file, and what was accepted.

    All bits of the first eight bytes of a file, which tell how to read the rest; then each byte as likely as any other.
    """
    assert all(accepted(reader, path) for reader in READERS)
    generator = random.Random(seed)
    contents = {file: file.read_bytes() for file in sorted(path.iterdir())}
    where = generator.choices(list(contents), weights=[len(data) for data in contents.values()], k=flips)
    bits = [(file, bit) for file in contents for bit in range(64)]
    bits += [(file, generator.randrange(8 * len(contents[file]))) for file in where]
    done: Counter[str] = Counter()
    taken = []
    for file, bit in bits:
        data = bytearray(contents[file])
        data[bit // 8] ^= 1 << bit % 8
        file.write_bytes(data)
        done[file.name] += 1
        taken += [f"{reader.__name__}: bit {bit} of {file.name}" for reader in READERS if accepted(reader, path)]
        file.write_bytes(contents[file])
    return done, taken


def main() -> int:
    """Make a checkpoint, flip, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strategy", default="fsdp")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bit-flips-") as folder:
        path = saved(Path(folder), given.strategy)
        close_pools()
        size = sum(file.stat().st_size for file in path.iterdir())
        began = time.perf_counter()
        done, taken = flip(path, given.flips, given.seed)
    for name, count in sorted(done.items()):
        print(f"{name:<32} {count:>6} flips")
    print(f"{sum(done.values())} single-bit flips over {size:,} bytes in {time.perf_counter() - began:.1f} s:", end=" ")
    print(f"{len(taken)} accepted by verify, load or reading all tensors")
    print("\n".join(taken[:20]), end="\n" if taken else "")
    return 1 if taken else 0


if __name__ == "__main__":
    # Ranks look functions up by the name of their module, which is not that of a script.
    sys.exit(importlib.import_module("bit_flips").main())
