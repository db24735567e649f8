"""Checkpoints that the real libraries wrote are converted, and training goes on with the losses they would have had."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from foreign_model import (
    FOLLOWING,
    GLOBAL_BATCH,
    SAVED_AFTER,
    Net,
    loader,
    loss_of,
    optimizer_of,
    schedule_of,
)
from models import silent_trainer
from torch import Tensor

from phalanx import TrainModule, checkpoint

TESTS = Path(__file__).parent.parent
ONE_RANK = ["lightning", "lightning-groups", "accelerate", "zero0", "zero3"]
# Accelerate's and Lightning's folders of DeepSpeed are of stage 2.
TWO_RANKS = ["accelerate-sharded", "lightning-sharded", "zero1", "zero3", "accelerate-deepspeed", "lightning-deepspeed"]
# Which tell where in the data they stood.
WITH_POSITION = ("lightning", "lightning-groups", "lightning-sharded", "lightning-deepspeed")
FORMAT_OF = {
    **{f"zero{stage}": "deepspeed" for stage in range(4)},
    "lightning-groups": "lightning",
}


class Model(TrainModule):
    """What was trained by Lightning, or its network alone by the others."""

    def __init__(self, groups: bool = True) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()
        self.losses: list[float] = []
        self.told: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.told = checkpoint.get("mine")

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self, self.hparams["groups"])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule_of(optimizer), "interval": "step"}}


class Unscheduled(Model):
    def configure_optimizers(self) -> Any:
        return optimizer_of(self, self.hparams["groups"])


@pytest.fixture(scope="session")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with everything that ``foreign_runs`` writes, in ``1`` and ``2`` by the number of ranks."""
    folder = tmp_path_factory.mktemp("foreign")
    runs = {1: ONE_RANK, 2: TWO_RANKS}
    processes = [process for size, kinds in runs.items() for process in start(folder / str(size), size, kinds)]
    deadline = time.monotonic() + 110
    try:
        for process in processes:
            output, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return folder


def start(folder: Path, size: int, kinds: list[str]) -> list[subprocess.Popen[str]]:
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    variables = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    own = {"OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return [
        subprocess.Popen(
            [sys.executable, str(TESTS / "foreign_runs.py"), str(folder), *kinds],
            env={**os.environ, **own, **{key: str(value) for key, value in variables.items()}, "RANK": str(rank),
                 "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        )
        for rank in range(size)
    ]  # fmt: skip


def converted(source: Path, out: Path, **arguments: Any) -> tuple[Path, list[str]]:
    notes: list[str] = []
    return checkpoint.convert(source, out, note=notes.append, **arguments), notes


def losses_after(path: Path, model: Model, *, at_start: bool = False) -> list[float]:
    """Resume in phalanx and return the next losses; ``at_start`` where the checkpoint does not tell the position."""
    batches = loader(start=SAVED_AFTER * GLOBAL_BATCH) if at_start else loader()
    trainer = silent_trainer(devices=1, max_steps=SAVED_AFTER + FOLLOWING)
    trainer.fit(model, batches, ckpt_path=path)
    assert trainer.global_step == SAVED_AFTER + FOLLOWING
    return model.losses


CASES = [*((1, kind) for kind in ONE_RANK), *((2, kind) for kind in TWO_RANKS)]


@pytest.mark.parametrize(("size", "kind"), CASES, ids=lambda value: str(value))
def test_training_goes_on_with_the_losses_of_the_library(foreign: Path, tmp_path: Path, size: int, kind: str) -> None:
    model = Unscheduled() if kind in ("accelerate-sharded",) else Model(groups=kind != "lightning")
    module = None if kind in ("lightning", "lightning-sharded", "lightning-deepspeed") else model

    path, _ = converted(foreign / str(size) / kind, tmp_path / "converted.ckpt", module=module)

    document = checkpoint.open_checkpoint(path).document
    assert document["converted"]["format"] == FORMAT_OF.get(kind, kind)
    expected = json.loads((foreign / str(size) / f"{kind}.json").read_text())
    found = losses_after(path, model, at_start=kind not in WITH_POSITION)
    assert len(expected) == FOLLOWING
    assert found == pytest.approx(expected, rel=1e-5)
    if kind in WITH_POSITION or kind.startswith("zero"):
        assert model.told == {"words": ["a", "b"]}
