"""The callbacks that write predictions, on one and several ranks."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from phalanx import TrainModule
from phalanx.callbacks import BasePredictionWriter, PredictionWriter
from phalanx.framework.core.errors import ConfigurationError


class Doubles(TrainModule):
    """Predicts twice its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.scale * batch[0] + 1000 * dataloader_idx


class Recorder(BasePredictionWriter):
    """Records the arguments of its calls."""

    def __init__(self, write_interval: str) -> None:
        super().__init__(write_interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        module: Any,
        prediction: Any,
        batch_indices: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        assert torch.equal(prediction, (2 * batch[0] + 1000 * dataloader_idx).reshape(prediction.shape))
        self.batches.append((dataloader_idx, batch_idx, batch_indices, prediction.tolist()))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        flat = [predictions] if len(batch_indices) == 1 else predictions
        self.epochs.append(([[each.tolist() for each in loader] for loader in flat], batch_indices))


def numbers(count: int, **settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(float(count))), **{"batch_size": 3, **settings})


def recorded(ranks: int, interval: str, counts: list[int], returned: bool) -> Any:
    writer = Recorder(interval)
    trainer = silent_trainer(devices=ranks, callbacks=[writer])
    loaders = [numbers(count) for count in counts]
    outputs = trainer.predict(Doubles(), loaders[0] if len(loaders) == 1 else loaders, return_predictions=returned)
    assert (outputs is None) is not returned
    return writer.batches, writer.epochs


@pytest.mark.parametrize(("interval", "returned"), [("batch", False), ("epoch", False), ("batch_and_epoch", True)])
def test_the_interval_decides_what_is_called(interval: str, returned: bool) -> None:
    batches, epochs = recorded(1, interval, [7], returned)
    indices = [[0, 1, 2], [3, 4, 5], [6]]
    predictions = [[2.0 * index for index in each] for each in indices]
    expected = [(0, number, each, predictions[number]) for number, each in enumerate(indices)]
    assert batches == (expected if interval != "epoch" else [])
    assert epochs == ([([predictions], [indices])] if interval != "batch" else [])


def test_ranks_write_the_predictions_of_their_own_batches() -> None:
    found = run_on_ranks(2, recorded, 2, "batch_and_epoch", [7, 2], False)
    for rank, (batches, epochs) in enumerate(found):
        indices = [[[0, 1, 2], [6]], [[0, 1]]] if rank == 0 else [[[3, 4, 5]], []]
        predictions = [
            [[2.0 * index + 1000 * loader for index in each] for each in own] for loader, own in enumerate(indices)
        ]
        assert epochs == [(predictions, indices)]
        assert [(loader, each) for loader, _, each, _ in batches] == [
            (loader, each) for loader, own in enumerate(indices) for each in own
        ]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(torch.tensor(float(number)),) for number in range(4)])


class Repeating(DataLoader[Any]):
    """Yields other batches than its sampler, so that no indices are known."""

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (numbers(4, num_workers=2, batch_size=1), [[0], [1], [2], [3]]),
        (numbers(4, batch_size=None, batch_sampler=None), [[0], [1], [2], [3]]),
        (
            DataLoader(
                TensorDataset(torch.arange(4.0)), batch_sampler=BatchSampler([3, 1, 0], batch_size=2, drop_last=False)
            ),
            [[3, 1], [0]],
        ),
        (DataLoader(Stream(), batch_size=2), [None, None]),
        (Repeating(TensorDataset(torch.arange(4.0)), batch_size=2), [None] * 4),
    ],
    ids=["workers", "unbatched", "batch sampler", "stream", "own iteration"],
)
def test_indices_of_other_loaders(loader: Any, expected: Any) -> None:
    writer = Recorder("batch_and_epoch")
    trainer = silent_trainer(callbacks=[writer])
    for _ in range(2):
        trainer.predict(Doubles(), loader, return_predictions=False)
    assert [indices for _, indices in writer.epochs] == [[expected]] * 2


class Output:
    """A prediction that is the same object wherever it is retained."""


class Predicting(Doubles):
    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return Output()


def test_no_prediction_is_retained_when_each_batch_is_written() -> None:
    references: list[weakref.ref[Output]] = []
    alive: list[int] = []

    class Counting(BasePredictionWriter):
        def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *_: Any) -> None:
            references.append(weakref.ref(prediction))
            alive.append(sum(reference() is not None for reference in references))

    silent_trainer(callbacks=[Counting()]).predict(Predicting(), numbers(60), return_predictions=False)
    assert len(alive) == 20
    assert max(alive) <= 2


def written(root: str, interval: str) -> None:
    trainer = silent_trainer(devices=2, callbacks=[PredictionWriter(root, interval)])
    trainer.predict(Doubles(), numbers(7), return_predictions=False)


def test_files_of_all_ranks_hold_all_predictions(tmp_path: Path) -> None:
    run_on_ranks(2, written, str(tmp_path), "batch_and_epoch")
    names = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.pt"))
    assert names == ["0/0-0.pt", "0/0-1.pt", "0/1-0.pt", "predictions-0.pt", "predictions-1.pt"]
    for pattern in ("0/*.pt", "predictions-*.pt"):
        found: dict[int, float] = {}
        for path in tmp_path.glob(pattern):
            saved = torch.load(path)
            batches = (
                zip(*saved.values(), strict=True)
                if pattern.startswith("0")
                else (
                    (value, index)
                    for values, indices in zip(saved["predictions"], saved["indices"][0], strict=True)
                    for value, index in zip(values, indices, strict=True)
                )
            )
            found.update({int(index): float(value) for value, index in batches})
        assert found == {number: 2.0 * number for number in range(7)}


def test_an_unknown_interval_or_a_missing_method_is_refused() -> None:
    with refuses(ConfigurationError, "write_interval='step'"):
        Recorder("step")
    with refuses(ConfigurationError, "write_on_epoch_end"):
        silent_trainer(callbacks=[BasePredictionWriter("epoch")]).predict(Doubles(), numbers(3))
