"""Checkpoints in a bucket: how long training waits for them, and their throughput beside the copies of s3fs.

The bucket is an S3 server in another process of this machine, with the faults that services have.

``python -m benchmarks.storage serve FAULTS`` is that server until its stdin is closed.
``python -m benchmarks.storage fit URL STEPS`` is one fit.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from s3fs import S3FileSystem
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Callback, Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint
from phalanx.checkpoint import CheckpointContents, Shard, save, weights
from phalanx.framework.distributed.world import World

from .checkpoints import seconds
from .tables import ROOT, Table, results

FAULTS: dict[str, dict[str, Any]] = {
    "a bucket": {},
    "a bucket that fails 5 % of requests": {"failing": 0.05},
    "a bucket that takes 0.1 s for each": {"latency": 0.1},
    "a bucket with lists of 5 s ago": {"old_lists": 5.0},
    "a bucket that is away for 20 s": {"outages": [(6.0, 26.0)]},
}
WIDTH, LAYERS, ROWS, EVERY = 512, 4, 64, 100
TENSORS, TENSOR_BYTES = 64, 2**24


def storage(rounds: int, quick: bool) -> Iterator[Table]:
    """How long training waits for a save, and the throughput of 1 GB."""
    steps = 500 if quick else 5000
    rows = [["a disk", *_waits(None, steps)]]
    for name, faults in FAULTS.items():
        with _server(faults) as variables:
            rows.append([name, *_waits(variables, steps)])
    yield Table("saves in a bucket", ["saved to", "ms that training waits", "worst", "ms per step"], rows)
    yield _throughput(min(rounds, 3), TENSORS // 16 if quick else TENSORS)


@contextlib.contextmanager
def _server(faults: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    """Serve a bucket; yield the variables by which processes find it."""
    python = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-m", "benchmarks.storage", "serve", json.dumps(faults)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=python) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.stdin.close()


def _waits(variables: Mapping[str, str] | None, steps: int) -> list[float]:
    with TemporaryDirectory() as folder:
        url = folder if variables is None else "s3://runs/waits"
        given = {"PHALANX_CACHE": folder, **(variables or {})}
        (found,) = results("benchmarks.storage", "fit", url, str(steps), seconds=600, variables=given)
    return list(found)


class Net(TrainModule):
    """Linear layers of one width, with AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Clock(Callback):
    """Takes the time from the end of a step to the begin of the next, in which checkpoints are saved."""

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.began = self._ended = time.perf_counter()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.waited.append(time.perf_counter() - self._ended)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._ended = time.perf_counter()


def _fit(url: str, steps: int) -> list[float]:
    """Train, and return the milliseconds of a save, the worst ones, and those of a step."""
    torch.set_num_threads(1)
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=steps, default_root_dir=url, logger=False,
        callbacks=[clock, ModelCheckpoint(every_n_train_steps=EVERY)], enable_progress_bar=False,
        enable_model_summary=False, verbose=False,
    )  # fmt: skip
    began = time.perf_counter()
    trainer.fit(Net(), DataLoader(torch.randn(ROWS * steps, WIDTH), ROWS))  # type: ignore[arg-type]
    # The first save imports what it needs.
    waits = clock.waited[2 * EVERY :: EVERY]
    each = (clock._ended - began) / steps
    return [statistics.median(waits) * 1e3, max(waits) * 1e3, each * 1e3]


def _throughput(rounds: int, tensors: int) -> Table:
    size = tensors * TENSOR_BYTES / 1e6
    contents = {f"layer{number}": Shard.whole(torch.randn(TENSOR_BYTES // 4)) for number in range(tensors)}
    measured: list[dict[str, float]] = []
    for number in range(rounds):
        # Alternating: the first one on a machine finds its memory in another state than the second.
        sides = (_plain, _phalanx) if number % 2 == 0 else (_phalanx, _plain)
        both = [side(CheckpointContents({"model": contents})) for side in sides]
        measured.append({**both[number % 2], **both[1 - number % 2]})
    found = {name: statistics.median(each[name] for each in measured) for name in measured[0]}
    bases = {
        "phalanx, save to the bucket": found["save to a disk"] + found["s3fs, upload of the file"],
        "phalanx, verified weights from the bucket": found["s3fs, download to a file"],
    }
    rows = [[name, size / each, f"{bases[name] / each:.2f}" if name in bases else ""] for name, each in found.items()]
    return Table(f"{size / 1e3:.1f} GB in a bucket", ["", "MB/s", "speed beside s3fs (and the disk)"], rows)


def _plain(contents: CheckpointContents) -> dict[str, float]:
    """Return the seconds of s3fs's own copies of a checkpoint's file, on a new server."""
    with TemporaryDirectory() as folder, _bucket(folder):
        files, disk = S3FileSystem(), Path(folder, "disk.ckpt")
        file = str(disk / "model-00000.safetensors")
        return {
            "save to a disk": seconds(lambda: save(disk, contents, World.single())),
            "s3fs, upload of the file": seconds(lambda: files.put_file(file, "runs/file")),
            "s3fs, download to a file": seconds(lambda: files.get_file("runs/file", f"{folder}/file")),
        }


def _phalanx(contents: CheckpointContents) -> dict[str, float]:
    """Return the seconds of phalanx's save and load, on a new server; the load finds an empty cache."""
    url = "s3://runs/saved.ckpt"
    with TemporaryDirectory() as folder, _bucket(folder):
        found = {"phalanx, save to the bucket": seconds(lambda: save(url, contents, World.single()))}
        os.environ["PHALANX_CACHE"] = f"{folder}/empty"
        return {**found, "phalanx, verified weights from the bucket": seconds(lambda: weights(url))}


@contextlib.contextmanager
def _bucket(folder: str) -> Iterator[None]:
    """Context in which this process finds a new server, and caches in a folder."""
    with _server({}) as variables:
        os.environ.update(variables, PHALANX_CACHE=f"{folder}/cache")
        S3FileSystem.clear_instance_cache()
        yield


def main() -> None:
    """Serve a bucket, or train."""
    if sys.argv[1] == "fit":
        print("RESULT", json.dumps(_fit(sys.argv[2], int(sys.argv[3]))))
        return
    from buckets import Bucket, Faults

    with Bucket(Faults(**json.loads(sys.argv[2]))) as bucket:
        print(json.dumps(bucket.environment), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
