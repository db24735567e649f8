"""Arguments of evaluation steps and hooks, and loaders without batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import loader
from ranks import run_on_ranks
from small_fits import Tiny, capturing, loader as rows, quiet_trainer
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from phalanx import Callback


class Forwarding(Tiny):
    """Hands on whatever its steps and hooks are given."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[int] = []

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self.given.append(len(args))
        return super().validation_step(*args[:2], **kwargs)

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self.given.append(1 + len(args))


class Watching(Callback):
    """Notes how many arguments follow the module."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def on_validation_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        self.given.append(len(args))


@pytest.mark.parametrize("loaders", [1, 2])
def test_the_index_of_a_loader_is_given_to_any_arguments_only_where_there_are_several(
    tmp_path: Path, loaders: int
) -> None:
    module, callback = Forwarding(), Watching()
    data = rows(4) if loaders == 1 else [rows(4), rows(4)]
    quiet_trainer(tmp_path, callback, max_epochs=1).validate(module, data)
    assert module.given == [1 + loaders, 2 + loaders] * loaders
    assert callback.given == [1 + loaders] * loaders


class Nothing(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def notes_of_empty(root: str, kind: str, devices: int) -> list[str]:
    """Return the notes of a fit of two epochs with one empty validation loader of two."""
    empty = DataLoader(Nothing()) if kind == "iterable" else rows(0)
    trainer = quiet_trainer(
        Path(root),
        [],
        max_epochs=2,
        devices=devices,
        strategy="ddp" if devices > 1 else "single",
        num_sanity_val_steps=2,
    )
    notes = capturing(trainer)
    trainer.fit(Tiny({"metric": [1.0]}), rows(), [rows(4), empty])
    return [note for note in notes if "has no batches" in note]


@pytest.mark.parametrize("kind", ["iterable", "map"])
def test_a_validation_loader_without_batches_is_reported_once(tmp_path: Path, kind: str) -> None:
    (note,) = notes_of_empty(str(tmp_path), kind, 1)
    assert note.startswith("val_dataloaders")
    assert len(run_on_ranks(2, notes_of_empty, str(tmp_path), kind, 2)[0]) == 1


def test_a_limit_of_zero_is_not_reported(tmp_path: Path) -> None:
    trainer = quiet_trainer(tmp_path, [], max_epochs=1, limit_test_batches=0, limit_val_batches=0)
    notes = capturing(trainer)
    trainer.fit(Tiny(), rows(), rows(4))
    assert not any("has no batches" in note for note in notes)


def test_samplers_of_validation_loaders_are_given_the_epoch(tmp_path: Path) -> None:
    class Recording(SequentialSampler):
        def __init__(self, data: Any) -> None:
            super().__init__(data)
            self.epochs: list[int] = []

        def set_epoch(self, epoch: int) -> None:
            self.epochs.append(epoch)

    data = loader(8).dataset
    sampler = Recording(data)

    class Silent(Tiny):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            assert torch.is_tensor(batch[0])

    trainer = quiet_trainer(tmp_path, [], max_epochs=3)
    trainer.fit(Silent(), rows(), DataLoader(data, sampler=sampler))
    assert sampler.epochs == [0, 1, 2]
