"""Checkpoints that the real libraries wrote are converted, and training goes on with the losses they would have had."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from contextlib import ExitStack
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
from ranks import completed, started_script
from torch import Tensor

from phalanx import Fabric, TrainModule, checkpoint
from phalanx.callbacks import EMAWeightAveraging
from phalanx.framework.core.errors import CheckpointError

# The first test waits for what the other libraries write, all of them.
pytestmark = pytest.mark.timeout(300)
TESTS = Path(__file__).parents[2]
# Accelerate's folder of DeepSpeed is of stage 1, Lightning's of stage 2.
KINDS = [
    *("lightning", "lightning-sharded", "lightning-deepspeed"),
    *("accelerate", "accelerate-sharded", "accelerate-deepspeed", "zero0", "zero3"),
]


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
    """The folder with everything that ``foreign_runs`` writes on two ranks, the same for all processes of a session."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "foreign"
    with Path(f"{folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            write_foreign_runs(folder)
            (folder / "complete").touch()
    return folder


def write_foreign_runs(folder: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PATH": path}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started_script(
                    TESTS / "foreign_runs.py",
                    str(folder),
                    env={**shared, "RANK": rank, "LOCAL_RANK": rank},
                    libraries=("deepspeed",),
                )
            )
            for rank in ("0", "1")
        ]
        for rank in ranks:
            done = completed(rank, 240)
            assert done.returncode == 0, done.stdout


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


@pytest.mark.parametrize("kind", KINDS)
def test_training_continues_with_the_losses_of_the_library(foreign: Path, tmp_path: Path, kind: str) -> None:
    has_position = kind.startswith("lightning")
    # Lightning's file alone has one group, whose names follow from the weights.
    model = Unscheduled() if kind == "accelerate-sharded" else Model(groups=kind != "lightning")
    module = None if kind == "lightning" else model

    path, _ = converted(foreign / kind, tmp_path / "converted.ckpt", module=module)

    document = checkpoint.open_checkpoint(path).document
    assert document["converted"]["format"] == ("deepspeed" if kind.startswith("zero") else kind)
    assert checkpoint.verify(path) == []
    expected = json.loads((foreign / f"{kind}.json").read_text())
    found = losses_after(path, model, at_start=not has_position)
    assert len(expected) == FOLLOWING
    assert found == pytest.approx(expected, rel=1e-5)
    if has_position or kind.startswith("zero"):
        assert model.told == {"words": ["a", "b"]}


def test_accelerates_folder_continues_in_a_loop_of_the_users(foreign: Path, tmp_path: Path) -> None:
    net = seeded_net()
    source = foreign / "accelerate"
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

    assert losses == pytest.approx(json.loads((foreign / "accelerate.json").read_text()), rel=1e-5)


def test_a_module_is_rebuilt_from_lightnings_hyperparameters(foreign: Path, tmp_path: Path) -> None:
    path, notes = converted(foreign / "lightning", tmp_path / "converted.ckpt", module=Model)
    theirs = torch.load(foreign / "lightning", weights_only=True)

    model = Model.load_from_checkpoint(path, average=False)

    assert model.hparams["groups"] is False
    assert model.net.head.weight is model.net.embed.weight
    assert all(torch.equal(tensor, theirs["current_model_state"][name]) for name, tensor in model.state_dict().items())
    assert checkpoint.open_checkpoint(path).document["converted"]["notes"] == notes

    # The average stays one beside the weights.
    average = Model.load_from_checkpoint(path, average="ema")
    assert all(torch.equal(tensor, theirs["state_dict"][name]) for name, tensor in average.state_dict().items())
    trainer = silent_trainer(max_steps=SAVED_AFTER, callbacks=[EMAWeightAveraging(decay=0.5)])
    trainer.fit(averaged := Model(groups=False), loader(), ckpt_path=path)
    assert torch.equal(averaged.net.head.weight, theirs["state_dict"]["net.head.weight"])


def test_several_groups_by_position_are_refused_without_the_module(foreign: Path, tmp_path: Path) -> None:
    with refuses(CheckpointError, "module="):
        converted(foreign / "accelerate", tmp_path / "converted.ckpt")
    assert not list(tmp_path.iterdir())


def test_a_missing_ranks_file_is_named(foreign: Path, tmp_path: Path) -> None:
    source = tmp_path / "zero3"
    shutil.copytree(foreign / "zero3", source)
    gone = next(source.glob("*/zero_pp_rank_1_mp_rank_00_optim_states.pt"))
    gone.unlink()

    with refuses(CheckpointError, "global_step4", "2 ranks"):
        converted(source, tmp_path / "converted.ckpt")
