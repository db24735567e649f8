"""The state of a data module is saved, and restored before its loaders are requested, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ranks import run_on_ranks
from small_fits import Tiny, capturing, loader, quiet_trainer

from phalanx import DataModule, checkpoint
from phalanx.callbacks import ModelCheckpoint


class Counting(DataModule):
    """Counts the loaders that it has created; the state has a number and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.events: list[str] = []

    def setup(self, stage: str) -> None:
        self.events.append("setup")

    def train_dataloader(self) -> Any:
        self.events.append("train_dataloader")
        self.made += 1
        return loader(32)

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made, "order": torch.arange(3) + self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.events.append("load_state_dict")
        assert state["order"].tolist() == [state["made"], state["made"] + 1, state["made"] + 2]
        self.made = state["made"]

    def val_dataloader(self) -> Any:
        return loader(4)


class Other(Counting):
    """A data module of another class."""


def fitted(root: str, data: DataModule, strategy: str, devices: int, ckpt_path: str | None = None) -> list[str]:
    """Train one epoch more than the checkpoint has; return the notes."""
    saver = ModelCheckpoint(Path(root) / "kept", "model", enable_version_counter=False)
    settings = {"strategy": strategy, "devices": devices, "max_epochs": 1 if ckpt_path is None else 2}
    trainer = quiet_trainer(Path(root), saver, **settings)
    notes = capturing(trainer)
    trainer.fit(Tiny({"metric": [1.0]}), datamodule=data, ckpt_path=ckpt_path)
    return notes


def saved_on_ranks(root: str, strategy: str) -> tuple[int, list[str]]:
    fitted(root, Counting(), strategy, 2)
    data = Counting()
    fitted(root, data, strategy, 2, f"{root}/kept/model.ckpt")
    return data.made, data.events


def test_the_state_is_restored_on_all_ranks_and_on_another_number_of_them(tmp_path: Path) -> None:
    order = ["setup", "load_state_dict", "train_dataloader"]
    assert run_on_ranks(2, saved_on_ranks, str(tmp_path), "zero2") == [(2, order)] * 2
    data = Counting()
    trainer = quiet_trainer(tmp_path, [], max_epochs=3, strategy="single")
    trainer.fit(Tiny(), datamodule=data, ckpt_path=str(tmp_path / "kept" / "model.ckpt"))
    assert (data.made, data.events) == (3, order)
    trainer.validate(Tiny(), datamodule=(data := Counting()), ckpt_path=str(tmp_path / "kept" / "model.ckpt"))
    assert (data.made, data.events) == (2, ["setup", "load_state_dict"])


def test_a_state_of_another_class_is_reported(tmp_path: Path) -> None:
    fitted(str(tmp_path), Counting(), "single", 1)
    notes = fitted(str(tmp_path), data := Other(), "single", 1, str(tmp_path / "kept" / "model.ckpt"))
    assert data.events == ["setup", "train_dataloader"]
    assert any("the state of the data module Counting, which this run does not have" in note for note in notes)


def test_a_converted_checkpoint_of_lightning_has_the_state_under_the_name_of_the_class(tmp_path: Path) -> None:
    module = Tiny()
    optimizer = module.configure_optimizers()
    torch.save(
        {
            "pytorch-lightning_version": "2.5.0",
            "epoch": 0,
            "global_step": 8,
            "state_dict": module.state_dict(),
            "loops": {},
            "callbacks": {},
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [],
            "Counting": {"made": 5, "order": torch.arange(3) + 5},
        },
        tmp_path / "model.ckpt",
    )
    path = checkpoint.convert(tmp_path / "model.ckpt", tmp_path / "converted.ckpt", module=module)
    data = Counting()
    trainer = quiet_trainer(tmp_path, [], max_epochs=2)
    trainer.fit(Tiny(), datamodule=data, ckpt_path=str(path))
    assert data.made == 6
