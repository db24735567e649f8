"""Checkpoints that the real libraries wrote are converted, and training goes on with the losses they would have had."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_model import (
    FOLLOWING,
    GLOBAL_BATCH,
    SAVED_AFTER,
    Net,
    global_batch,
    loader,
    loss_of,
    optimizer_of,
    schedule_of,
    seeded_net,
)
from messages import refuses
from models import silent_trainer
from torch import Tensor

from phalanx import Fabric, TrainModule, checkpoint
from phalanx.callbacks import EMAWeightAveraging
from phalanx.framework.core.errors import CheckpointError

# The first test waits for what the other libraries write, all of them.
pytestmark = pytest.mark.timeout(300)
TESTS = Path(__file__).parents[2]
ONE_RANK = ["lightning", "lightning-groups", "lightning-averaged", "accelerate", "zero0", "zero3"]
# Accelerate's and Lightning's folders of DeepSpeed are of stage 2.
TWO_RANKS = ["accelerate-sharded", "lightning-sharded", "zero1", "zero3", "accelerate-deepspeed", "lightning-deepspeed"]
# Which tell where in the data they stood.
WITH_POSITION = ("lightning", "lightning-groups", "lightning-averaged", "lightning-sharded", "lightning-deepspeed")
FORMAT_OF = {
    **{f"zero{stage}": "deepspeed" for stage in range(4)},
    "lightning-groups": "lightning",
    "lightning-averaged": "lightning",
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
    deadline = time.monotonic() + 240
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
def test_training_continues_with_the_losses_of_the_library(foreign: Path, tmp_path: Path, size: int, kind: str) -> None:
    model = (
        Unscheduled()
        if kind in ("accelerate-sharded",)
        else Model(groups=kind not in ("lightning", "lightning-averaged"))
    )
    module = None if kind.startswith("lightning") and kind != "lightning-groups" else model

    path, _ = converted(foreign / str(size) / kind, tmp_path / "converted.ckpt", module=module)

    document = checkpoint.open_checkpoint(path).document
    assert document["converted"]["format"] == FORMAT_OF.get(kind, kind)
    expected = json.loads((foreign / str(size) / f"{kind}.json").read_text())
    found = losses_after(path, model, at_start=kind not in WITH_POSITION)
    assert len(expected) == FOLLOWING
    assert found == pytest.approx(expected, rel=1e-5)
    if kind in WITH_POSITION or kind.startswith("zero"):
        assert model.told == {"words": ["a", "b"]}


def test_accelerates_folder_continues_in_a_loop_of_the_users(foreign: Path, tmp_path: Path) -> None:
    net = seeded_net()
    source = foreign / "1" / "accelerate"
    path, notes = converted(source, tmp_path / "converted.ckpt", module=net, optimizers=optimizer_of(net, True))
    assert any("random_states_0.pkl" in note for note in notes)

    fabric = Fabric(accelerator="cpu", devices=1)
    other = Net()
    model, optimizer = fabric.setup(other, optimizer_of(other, True))
    scheduler = fabric.setup_scheduler(schedule_of(optimizer))
    fabric.setup_dataloaders(loader())
    fabric.load_state(path)
    losses = []
    for number in range(SAVED_AFTER, SAVED_AFTER + FOLLOWING):
        loss = loss_of(model, global_batch(number))
        losses.append(loss.item())
        fabric.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    assert losses == pytest.approx(json.loads((foreign / "1" / "accelerate.json").read_text()), rel=1e-5)


def test_a_module_is_rebuilt_from_lightnings_hyperparameters(foreign: Path, tmp_path: Path) -> None:
    path, notes = converted(foreign / "1" / "lightning-groups", tmp_path / "converted.ckpt", module=Model)

    model = Model.load_from_checkpoint(path)

    assert model.hparams["groups"] is True
    assert model.net.head.weight is model.net.embed.weight
    saved = torch.load(foreign / "1" / "lightning-groups", weights_only=True)["state_dict"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert checkpoint.open_checkpoint(path).document["converted"]["notes"] == notes
    checkpoint.verify(path)


def test_an_average_stays_one_beside_the_weights(foreign: Path, tmp_path: Path) -> None:
    source = foreign / "1" / "lightning-averaged"
    path, _ = converted(source, tmp_path / "converted.ckpt")
    theirs = torch.load(source, weights_only=True)
    for average, held in (("ema", "state_dict"), (None, "current_model_state")):
        model = Model.load_from_checkpoint(path, average=average)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, theirs[held][name])

    trainer = silent_trainer(max_steps=SAVED_AFTER, callbacks=[EMAWeightAveraging(decay=0.5)])
    trainer.fit(averaged := Model(groups=False), loader(), ckpt_path=path)
    assert torch.equal(averaged.net.head.weight, theirs["state_dict"]["net.head.weight"])


def test_several_groups_by_position_are_refused_without_the_module(foreign: Path, tmp_path: Path) -> None:
    with refuses(CheckpointError, "module="):
        converted(foreign / "1" / "lightning-groups", tmp_path / "converted.ckpt")
    with refuses(CheckpointError, "module="):
        converted(foreign / "1" / "accelerate", tmp_path / "converted.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_missing_ranks_file_is_named(foreign: Path, tmp_path: Path) -> None:
    source = tmp_path / "zero3"
    shutil.copytree(foreign / "2" / "zero3", source)
    gone = next(source.glob("*/zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    gone.unlink()

    with refuses(CheckpointError, "global_step4", "2 ranks"):
        converted(source, tmp_path / "converted.ckpt")


def test_a_latest_that_names_no_step_is_refused(foreign: Path, tmp_path: Path) -> None:
    source = tmp_path / "zero1"
    shutil.copytree(foreign / "2" / "zero1", source)
    (source / "latest").write_text("global_step5")

    with refuses(CheckpointError, "'global_step5'", "'global_step4'"):
        converted(source, tmp_path / "converted.ckpt")
