"""Predictions come back on every rank in the dataset's order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from logged import counted_collectives
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from phalanx import Callback, Trainer, TrainModule


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(float(self.count)))


class Pair(NamedTuple):
    left: Tensor
    right: list[Tensor]


class Numbers(TrainModule):
    """Predicts from numbers, in many forms."""

    def __init__(self, form: str = "tensor") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.form = form

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x = batch[0] if isinstance(batch, list | tuple) else batch
        y = x * self.scale + 1000 * dataloader_idx
        forms = {
            "tensor": y,
            "dict": {"y": y, "name": [f"item {int(value)}" for value in x], "deep": {"x": (x, 1)}},
            "named": Pair(y, [x, x.sum()]),
            "none": None,
            "some": y if int(x[0]) % 2 else None,
            "number": x.sum().item(),
            "view": torch.stack([y] * 100)[0],
        }
        return forms[self.form]


def source(kind: str, count: int) -> Any:
    if kind == "stream":
        return DataLoader(Stream(count), batch_size=3)
    return DataLoader(TensorDataset(torch.arange(float(count))), batch_size=3)


def plain(outputs: Any) -> Any:
    """Return outputs with lists for tensors, to compare them; none of them may hold a gradient."""

    def as_list(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            assert not leaf.requires_grad
            assert leaf.device.type == "cpu"
            return leaf.tolist()
        return leaf

    return tree_map(as_list, outputs)


def predicted(ranks: int, form: str, kind: str, counts: list[int], settings: dict[str, Any]) -> Any:
    trainer = silent_trainer(devices=ranks, **settings)
    loaders = [source(kind, count) for count in counts]
    outputs = trainer.predict(Numbers(form), loaders[0] if len(loaders) == 1 else loaders)
    return plain(outputs)


@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (2, 22), (3, 5), (3, 100)])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_predictions_are_in_dataset_order_on_all_ranks(ranks: int, kind: str, count: int) -> None:
    outputs = predicted(1, "tensor", kind, [count], {})
    assert [value for batch in outputs for value in batch] == [2.0 * number for number in range(count)]
    assert run_on_ranks(ranks, predicted, ranks, "tensor", kind, [count], {}) == [outputs] * ranks


@pytest.mark.parametrize("form", ["dict", "named", "none", "some", "number", "view"])
def test_outputs_of_any_form(form: str) -> None:
    expected = predicted(1, form, "map", [22], {})
    assert len(expected) == 8
    found = run_on_ranks(3, predicted, 3, form, "map", [22], {})
    assert found == [expected] * 3
    if form == "named":
        assert type(found[0][0]) is Pair


@pytest.mark.parametrize("counts", [[1, 22, 2], [22, 1]])
def test_several_loaders_give_a_list_each(counts: list[int]) -> None:
    expected = predicted(1, "tensor", "map", counts, {})
    assert [sum(len(batch) for batch in outputs) for outputs in expected] == counts
    assert expected[1][0][0] == 1000.0
    assert run_on_ranks(3, predicted, 3, "tensor", "map", counts, {}) == [expected] * 3


@pytest.mark.parametrize("limit", [3, 0.5])
def test_limits_count_as_in_one_process(limit: float) -> None:
    settings = {"limit_predict_batches": limit}
    expected = predicted(1, "tensor", "map", [22], settings)
    assert len(expected) == (4 if limit == 0.5 else limit)
    assert run_on_ranks(2, predicted, 2, "tensor", "map", [22], settings) == [expected] * 2


def test_outputs_do_not_hold_what_they_are_a_view_of() -> None:
    for batch in silent_trainer().predict(Numbers("view"), source("map", 7)) or ():
        assert batch.untyped_storage().nbytes() == batch.nbytes


class Default(TrainModule):
    """Has no predict_step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x) * self.scale
        return output


def test_by_default_the_module_is_called_in_evaluation_mode() -> None:
    module = Default()
    outputs = silent_trainer().predict(module, DataLoader(Stream(4), batch_size=2))
    assert plain(outputs) == [[0.0, 1.0], [2.0, 3.0]]
    assert module.net.training


class Watcher(Callback):
    """Notes what each batch gave, and the order of hooks."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Any]] = []
        self.hooks: list[str] = []

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.hooks.append("start")

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self.hooks.append("epoch_start")

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append((batch_idx, outputs.tolist()))

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.hooks.append("epoch_end")

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self.hooks.append("end")


def without_return(ranks: int) -> Any:
    watcher = Watcher()
    trainer = silent_trainer(devices=ranks, callbacks=[watcher])
    assert trainer.predict(Numbers(), source("map", 7), return_predictions=False) is None
    return watcher.seen, watcher.hooks


def collectives(ranks: int) -> list[int]:
    counts = []
    for kept in (True, False):
        trainer = silent_trainer(devices=ranks)
        with counted_collectives() as calls:
            trainer.predict(Numbers(), [source("map", 7), source("map", 5)], return_predictions=kept)
        counts.append(calls.count("all_gather"))
    return counts


def test_outputs_of_all_loaders_travel_in_one_exchange_if_they_are_wanted() -> None:
    for kept, dropped in run_on_ranks(2, collectives, 2):
        assert kept == dropped + 1


def test_hooks_see_the_outputs_whether_they_are_returned_or_not() -> None:
    seen, hooks = without_return(1)
    assert seen == [(0, [0.0, 2.0, 4.0]), (1, [6.0, 8.0, 10.0]), (2, [12.0])]
    assert hooks == ["start", "epoch_start", "epoch_end", "end"]
    found = run_on_ranks(2, without_return, 2)
    assert [batch for part, _ in found for _, batch in part] == [seen[0][1], seen[2][1], seen[1][1]]
