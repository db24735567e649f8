"""Collectives of the user's code where ranks have different numbers of batches, and batches of different sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import refuses
from models import plain_steps, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import TrainModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.fabric.fabric import Fabric

ROWS = 9


class Gathering(TrainModule):
    """Calls collectives in all steps, with each batch of 2 rows and the last one of 1."""

    def __init__(self, trains: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        nn.init.constant_(self.net.weight, 0.5)
        nn.init.constant_(self.net.bias, 0.25)
        self.trains, self.seen, self.sums, self.sizes = trains, list[float](), list[float](), list[int]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square()
        if self.trains:
            # The mean over the rows of all ranks, as a loss of negatives from other ranks has it.
            loss = self.all_gather(loss, sync_grads=True).flatten(0, -2)
        mean: Tensor = loss.mean()
        return mean

    def _evaluate(self, batch: Tensor) -> Tensor:
        self.seen += self.all_gather(batch).flatten().tolist()
        self.sums.append(float(self.fabric.all_reduce(batch.sum(), "sum")))
        self.sizes.append(len(self.fabric.gather(batch)))
        self.fabric.barrier()
        return batch

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self._evaluate(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self._evaluate(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def rows(count: int = ROWS) -> DataLoader[Any]:
    return DataLoader(torch.arange(1.0, count + 1).unsqueeze(1), batch_size=2)  # type: ignore[arg-type]


def evaluated(strategy: str, ranks: int, count: int) -> list[tuple[list[float], float, int, int]]:
    results = []
    for stage in ("fit", "test", "predict"):
        module = Gathering()
        trainer = silent_trainer(devices=ranks, strategy=strategy, max_epochs=1, num_sanity_val_steps=0)
        found = getattr(trainer, stage)(module, rows(count), *([rows(count)] if stage == "fit" else []))
        # A rank without a batch in the last round has not seen its rows.
        results.append((module.seen, sum(module.sums), sum(module.sizes), len(found) if stage == "predict" else 0))
    return results


@pytest.mark.parametrize(("ranks", "strategy", "count"), [(2, "fsdp", ROWS), (3, "ddp", 7), (2, "ddp", 1)])
def test_steps_of_an_evaluation_call_collectives(ranks: int, strategy: str, count: int) -> None:
    everything = [float(number) for number in range(1, count + 1)]
    # The ranks that a batch reaches: the last round has one batch, of rank 0.
    for first, *others in zip(*run_on_ranks(ranks, evaluated, strategy, ranks, count), strict=True):
        assert first[:3] == (everything, sum(everything), count)
        for other in others:
            if strategy == "ddp":
                assert other[0] == everything[: len(other[0])]


def trained(ranks: int) -> Tensor:
    module = Gathering(trains=True)
    silent_trainer(devices=ranks, strategy="ddp", max_epochs=2).fit(module, rows())
    return weights_of(module.net)


def test_a_training_step_gathers_where_a_rank_has_no_batch() -> None:
    net = Gathering().net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = torch.arange(1.0, ROWS + 1).unsqueeze(1).split(4)
    plain_steps(optimizer, lambda batch: net(batch).square().mean(), 2 * batches)
    for weights in run_on_ranks(2, trained, 2):
        torch.testing.assert_close(weights, weights_of(net))


def metric_values(ranks: int) -> list[float]:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Measuring(Gathering):
        def __init__(self) -> None:
            super().__init__()
            self.total = torchmetrics.SumMetric(dist_sync_on_step=True)
            self.steps: list[float] = []

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.steps.append(float(self.total(batch)))
            self.log("total", self.total)

    module = Measuring()
    trainer = silent_trainer(devices=ranks, strategy="ddp", max_epochs=1, num_sanity_val_steps=0)
    trainer.fit(module, rows(), rows())
    assert module.total.dist_sync_fn is None
    return [sum(module.steps), float(trainer.callback_metrics["total"])]


def test_a_metric_that_communicates_in_each_step() -> None:
    first, _ = run_on_ranks(2, metric_values, 2)
    assert first == [45.0, 45.0]


def gathered() -> list[Any]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    rank, size = fabric.global_rank, fabric.global_rank + 1
    tensor = torch.full((size, 2), float(rank), requires_grad=True)
    stacked = fabric.all_gather({"a": tensor, "b": 1}, sync_grads=True)
    (stacked["a"] * torch.tensor([[[1.0], [2.0], [3.0]]])).sum().backward()
    assert tensor.grad is not None
    with refuses(ConfigurationError, "pad_across_processes"):
        fabric.all_gather(torch.zeros(2, size))
    return [stacked["a"].tolist(), stacked["b"].tolist(), tensor.grad[:, 0].tolist()]


def test_tensors_with_different_numbers_of_rows() -> None:
    first, second = run_on_ranks(2, gathered)
    assert first[:2] == second[:2] == [[[[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]], [1, 1]]
    # Twice: the losses of both ranks.
    assert (first[2], second[2]) == ([2.0], [4.0, 6.0])
