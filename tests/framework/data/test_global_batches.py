"""Global batches: steps over a fixed number of samples equal hand-written torch for any ranks and micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, plain_steps, regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from phalanx import Trainer
from phalanx.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from phalanx.framework.core.errors import ConfigurationError


class Noting(Regressor):
    """Notes the index and the number of rows of every micro-batch."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.seen: list[tuple[int, int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append((batch_idx, len(batch[0])))
        loss = super().training_step(batch, batch_idx)
        self.log("rows", len(batch[0]), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss


def by_hand(samples: int, size: int, epochs: int, drop_last: bool = False) -> Tensor:
    """Return the weights after steps over ``size`` consecutive samples each, in plain torch."""
    module = Regressor(optimizer="sgd")
    optimizer, batches = module.configure_optimizers(), [*loader(samples, size, drop_last=drop_last)]
    plain_steps(optimizer, lambda batch: module.training_step(batch, 0), epochs * batches)
    return weights_of(module)


def fitted(
    samples: int, size: int, micro: int | None, strategy: str = "auto", ranks: int = 1, **loading: Any
) -> tuple[Tensor, list[tuple[int, int]], int, int]:
    module = Noting(optimizer="sgd")
    trainer = silent_trainer(
        max_epochs=2, devices=ranks, strategy=strategy, global_batch_size=size, micro_batch_size=micro
    )
    trainer.fit(module, DataLoader(regression_data(samples), **{"batch_size": 4, **loading}))
    assert trainer.callback_metrics["rows"] == (samples // size * size if loading.get("drop_last") else samples)
    return weights_of(module), module.seen, trainer.global_step, int(trainer.num_training_batches)


@pytest.mark.parametrize("micro", [1, 3, 8, None])
def test_a_step_equals_one_over_the_global_batch(micro: int | None) -> None:
    weights, seen, steps, batches = fitted(20, 8, micro)

    torch.testing.assert_close(weights, by_hand(20, 8, 2), rtol=1e-6, atol=1e-7)
    assert (steps, batches) == (6, 3)
    assert [rows for index, rows in seen[: len(seen) // 2] if index == 0] == {
        1: [1] * 8, 3: [3, 3, 2], 8: [8], None: [4, 4]
    }[micro]  # fmt: skip
    assert {index for index, _ in seen} == {0, 1, 2}


def test_a_short_last_global_batch_is_dropped_where_the_loader_says_so() -> None:
    weights, _, steps, batches = fitted(20, 8, 3, drop_last=True)

    torch.testing.assert_close(weights, by_hand(20, 8, 2, drop_last=True), rtol=1e-6, atol=1e-7)
    assert (steps, batches) == (4, 2)


def test_workers_read_the_same_global_batches() -> None:
    with_workers, _, _, _ = fitted(20, 8, 3, num_workers=2)

    torch.testing.assert_close(with_workers, by_hand(20, 8, 2), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("ranks", "strategy", "size", "micro"),
    [(3, "ddp", 7, 2), (2, "fsdp", 12, 4), (3, "fsdp", 7, 2), (2, "zero2", 12, 4), (2, "zero3", 7, 2)],
)
def test_any_number_of_ranks_makes_the_same_steps(ranks: int, strategy: str, size: int, micro: int) -> None:
    # The last global batch has one sample or ten: a rank may have none of it.
    results = run_on_ranks(ranks, fitted, 22, size, micro, strategy, ranks, timeout=120)

    torch.testing.assert_close(results[0][0], by_hand(22, size, 2), rtol=1e-5, atol=1e-6)
    assert {result[2] for result in results} == {2 * -(-22 // size)}


def shuffled(root: Path, size: int, micro: int, ranks: int, steps: int, path: str | None) -> tuple[Tensor, list[int]]:
    """Train to a number of steps; return the weights and the samples of the steps in order."""
    module = Numbered()
    saves = ModelCheckpoint(dirpath=root, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    torch.manual_seed(5)
    trainer = silent_trainer(
        max_epochs=2, max_steps=steps, devices=ranks, global_batch_size=size, micro_batch_size=micro,
        callbacks=saves, enable_checkpointing=None, strategy="ddp" if ranks > 1 else "single",
    )  # fmt: skip
    trainer.fit(module, DataLoader(Rows(22), batch_size=3, shuffle=True), ckpt_path=path)
    return weights_of(module), module.rows


class Rows(Dataset[Tensor]):
    """Rows of 6 numbers, the first of which is the index."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
        self.rows[:, 0] = torch.arange(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


class Numbered(Regressor):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd", lr=1e-3)
        self.rows: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows += batch[:, 0].int().tolist()
        return self(batch).square().mean()


def test_a_resumed_fit_is_bit_identical(tmp_path: Path) -> None:
    whole, rows = shuffled(tmp_path / "whole", 8, 3, 1, 6, None)
    shuffled(tmp_path, 8, 3, 1, 2, None)

    resumed, rest = shuffled(tmp_path / "resumed", 8, 3, 1, 6, str(tmp_path / "step=2.ckpt"))

    assert torch.equal(whole, resumed)
    assert rest == rows[16:]


def test_another_number_of_ranks_and_size_of_micro_batches_continue_with_the_same_global_batches(
    tmp_path: Path,
) -> None:
    whole, rows = shuffled(tmp_path / "whole", 8, 3, 1, 6, None)
    shuffled(tmp_path, 8, 3, 1, 2, None)

    results = run_on_ranks(2, shuffled, tmp_path / "two", 8, 2, 2, 6, str(tmp_path / "step=2.ckpt"))

    torch.testing.assert_close(results[0][0], whole, rtol=1e-5, atol=1e-6)
    (_, first), (_, second) = results
    # The epoch ends with a global batch of 6 samples; each rank has a contiguous half of every global batch.
    assert first[:3] + second[:3] == rows[16:22]
    assert first[3:7] + second[3:7] == rows[22:30]


# ---- what is refused ----------------------------------------------------------------------------------------------


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.zeros(4, 6))


DATA = regression_data(20)


@pytest.mark.parametrize(
    ("settings", "loader", "name"),
    [
        ({"micro_batch_size": 4}, None, "global_batch_size"),
        ({"global_batch_size": 8, "micro_batch_size": 9}, None, "micro_batch_size=9"),
        ({"global_batch_size": 8, "micro_batch_size": "all"}, None, "micro_batch_size='all'"),
        ({"global_batch_size": 8, "accumulate_grad_batches": 2}, None, "accumulate_grad_batches=2"),
        (
            {"global_batch_size": 1, "devices": 2, "strategy": "ddp"},
            DataLoader(DATA, batch_size=4),
            "global_batch_size=1",
        ),
        ({"global_batch_size": 8}, DataLoader(Stream(), batch_size=2), "train_dataloaders"),
        ({"global_batch_size": 8}, {"a": DataLoader(DATA)}, "train_dataloaders"),
        ({"global_batch_size": 8}, DataLoader(DATA, batch_size=None), "batch_size=None"),
        (
            {"global_batch_size": 8},
            DataLoader(DATA, batch_sampler=list(BatchSampler(SequentialSampler(DATA), 4, False))),
            "batch_sampler",
        ),
        (
            {"global_batch_size": 8},
            DataLoader(DATA, sampler=DistributedSampler(DATA, 1, 0), batch_size=2),
            "use_distributed_sampler",
        ),
        ({"global_batch_size": 8, "use_distributed_sampler": False}, DataLoader(DATA), "use_distributed_sampler"),
        ({"global_batch_size": 64}, DataLoader(DATA, drop_last=True), "drop_last"),
        (
            {"global_batch_size": 8, "callbacks": GradientAccumulationScheduler({0: 2})},
            DataLoader(DATA),
            "GradientAccumulationScheduler",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(settings: dict[str, Any], loader: Any, name: str) -> None:
    with refuses(ConfigurationError, name):
        silent_trainer(max_epochs=1, **settings).fit(Regressor(), loader)


def test_manual_optimization_is_refused() -> None:
    class Manual(Regressor):
        automatic_optimization = False

    with refuses(ConfigurationError, "global_batch_size=8", "automatic_optimization"):
        silent_trainer(max_epochs=1, global_batch_size=8).fit(Manual(), DataLoader(DATA))


def test_the_plan_measures_a_micro_batch() -> None:
    trainer = Trainer(global_batch_size=16, micro_batch_size=2, accelerator="cpu", devices=1, logger=False)

    plan = trainer.plan(Regressor(), DataLoader(DATA, batch_size=10))

    assert plan.data is not None
    assert plan.data.micro_batch == 2
    assert plan.accumulates
