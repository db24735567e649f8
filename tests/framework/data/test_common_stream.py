"""Iterable data that is not the same on all ranks is reported at the start."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from small_fits import Tiny, capturing, quiet_trainer
from torch.utils.data import DataLoader, IterableDataset

from phalanx.framework.data.common_stream import fingerprint_of


class Rows(IterableDataset[Any]):
    """Rows, of which each rank reads its own, or all of them in a seeded, unseeded or natural order."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __iter__(self) -> Iterator[Any]:
        rows = list(torch.arange(32.0).reshape(8, 4))
        if self.kind == "sharded":
            rows = rows[dist.get_rank() :: dist.get_world_size()]
        if self.kind == "shuffled":
            random.Random(dist.get_rank()).shuffle(rows)
        if self.kind == "seeded":
            random.Random(0).shuffle(rows)
        return iter([(row,) for row in rows])


class Reading(Tiny):
    """Trains on one batch or a list of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch if torch.is_tensor(batch[0]) else batch[0], batch_idx)


def notes_of_fit(root: str, kind: str, where: str, sampler: bool = True) -> list[str]:
    trainer = quiet_trainer(
        Path(root), [], max_epochs=2, devices=2, strategy="ddp", use_distributed_sampler=sampler, num_sanity_val_steps=1
    )
    notes = capturing(trainer)
    data, plain = DataLoader(Rows(kind), batch_size=2), DataLoader(Rows("plain"), batch_size=2)
    loaders = {"training": data, "both": [plain, data]}.get(where, plain)
    trainer.fit(Reading({"metric": [1.0]}), loaders, data if where == "validation" else plain)
    return [note for note in notes if "different batches" in note]


def notes(root: str) -> dict[tuple[str, str], list[str]]:
    cases = [("sharded", "training"), ("shuffled", "training"), ("sharded", "validation"), ("seeded", "training")]
    found = {case: notes_of_fit(root, *case) for case in [*cases, ("plain", "both"), ("sharded", "both")]}
    return {**found, ("sharded", "by hand"): notes_of_fit(root, "sharded", "training", sampler=False)}


def test_ranks_that_read_different_batches_are_reported_once(tmp_path: Path) -> None:
    for found in run_on_ranks(2, notes, str(tmp_path)):
        reported = {case: len(texts) for case, texts in found.items() if texts}
        assert reported == {
            ("sharded", "training"): 1,
            ("shuffled", "training"): 1,
            ("sharded", "validation"): 1,
            ("sharded", "both"): 1,
        }
        (text,) = found["sharded", "training"]
        assert "from train_dataloaders." in text
        assert "1/2" in text
        assert "use_distributed_sampler=False" in text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.ones(3)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        (torch.tensor(1), torch.tensor(2)),
        ({"x": [1, 2]}, {"x": [1, 3]}),
        (numpy.zeros(2), numpy.ones(2)),
        (["a"], ["b"]),
        (torch.eye(2).to_sparse(), torch.eye(3).to_sparse()),
    ],
)
def test_a_fingerprint_depends_on_the_contents_of_a_batch(one: Any, other: Any) -> None:
    assert fingerprint_of(one) == fingerprint_of(one)
    assert fingerprint_of(one) != fingerprint_of(other)
    assert fingerprint_of(object()) == fingerprint_of(object())
