"""The size with which found micro-batches begin: that of the memory plan, the one that was given, or a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from exhausted import Exhausted, strategy_of
from messages import refuses
from models import regression_data, silent_trainer, weights_of
from ranks import run_on_ranks
from torch.utils.data import DataLoader

from phalanx import Trainer
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.memory.available_memory import Memory
from phalanx.framework.trainer import auto_strategy

SAMPLES, READ, USABLE = 32, 4, 0.9


class Recorded(Exhausted):
    """Records the sizes of its micro-batches. A module that a plan measures is a copy."""

    def __init__(self, largest: int) -> None:
        super().__init__("forward", 0, largest)
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


def made(micro: str, ranks: int = 1, strategy: str = "single", **settings: Any) -> Trainer:
    return silent_trainer(
        max_steps=settings.pop("max_steps", 2),
        devices=ranks,
        strategy=strategy_of(strategy),
        global_batch_size=SAMPLES * ranks,
        micro_batch_size=micro,
        **settings,
    )


def loader() -> DataLoader[Any]:
    return DataLoader(regression_data(192), batch_size=READ)


@contextmanager
def memory_for(trainer: Trainer, module: Recorded, samples: float) -> Iterator[None]:
    """Leave each rank as much memory as the plan counts for micro-batches of this size."""
    plan = trainer.plan(module, loader())
    assert plan.activations is not None
    needs = plan[trainer.strategy.name].needs.device
    kept = plan.activations.kept
    available = int((needs.total - needs.activations + kept * samples / READ) / USABLE)
    with mock.patch.object(auto_strategy, "available_memory", return_value=Memory(available, available)):
        yield


def begun(ranks: int, strategy: str, samples: list[float], largest: int) -> tuple[list[int], int, int | None]:
    """Return the sizes of this rank's micro-batches, the errors, and the size in the end."""
    torch.manual_seed(1)
    module, trainer = Recorded(largest), made("auto", ranks, strategy)
    rank = trainer.global_rank
    with memory_for(trainer, module, samples[rank % len(samples)]):
        trainer.fit(module, loader())
    return module.sizes, module.raised, trainer.micro_batch_size


@pytest.mark.parametrize(("samples", "first"), [(100.0, 32), (31.0, 16), (1.5, 1), (0.5, 32)])
def test_a_fit_begins_with_the_size_of_the_memory_plan(samples: float, first: int) -> None:
    sizes, raised, last = begun(1, "single", [samples], SAMPLES)

    assert sizes == [first] * (2 * SAMPLES // first)
    assert (raised, last) == (0, first)


@pytest.mark.parametrize(("ranks", "strategy"), [(2, "zero2"), (3, "ddp")])
def test_ranks_begin_with_the_size_of_the_one_with_the_least_memory(ranks: int, strategy: str) -> None:
    for sizes, raised, last in run_on_ranks(ranks, begun, ranks, strategy, [100.0, 17.0], SAMPLES, timeout=120):
        assert sizes == [16] * 4
        assert (raised, last) == (0, 16)


def test_where_the_plan_is_wrong_the_size_is_halved() -> None:
    sizes, raised, last = begun(1, "single", [17.0], 5)

    assert sizes == [16, 8, *[4] * 16]
    assert (raised, last) == (2, 4)


def test_the_fit_is_that_of_the_same_size_given() -> None:
    def weights(micro: str | int) -> torch.Tensor:
        torch.manual_seed(1)
        module = Exhausted("forward", 0, SAMPLES, dropout=0.5)
        trainer = made(micro)  # type: ignore[arg-type]
        trainer.fit(module, DataLoader(regression_data(192), batch_size=READ, shuffle=True))
        return weights_of(module)

    assert torch.equal(weights("auto"), weights(SAMPLES))
    assert torch.equal(weights("auto:8"), weights(8))


def test_a_size_that_is_given_and_that_of_a_checkpoint_precede_the_plan(tmp_path: Path) -> None:
    module, trainer = Recorded(5), made("auto:20")
    with memory_for(trainer, module, 9.0):
        trainer.fit(module, loader())
    assert module.sizes[:3] == [20, 10, 5]
    trainer.save_checkpoint(tmp_path / "saved")
    again, resumed = Recorded(SAMPLES), made("auto:20", max_steps=3)
    resumed.fit(again, loader(), ckpt_path=tmp_path / "saved")
    assert again.sizes == [5] * 6 + [2]
    # It is at most the part of a rank.
    fresh = Recorded(SAMPLES)
    made("auto:1000").fit(fresh, loader())
    assert fresh.sizes == [SAMPLES] * 2


def test_a_step_that_cannot_be_measured_begins_with_the_whole_part() -> None:
    class Unmeasurable(Recorded):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert self.trainer.run is not None, "a plan runs no fit"
            return super().training_step(batch, batch_idx)

    module, trainer = Unmeasurable(SAMPLES), made("auto")
    trainer.fit(module, loader())
    assert module.sizes == [SAMPLES] * 2


@pytest.mark.parametrize("given", ["auto:0", "auto:", "auto:2.5", "AUTO"])
def test_other_words_are_refused(given: str) -> None:
    with refuses(ConfigurationError, "micro_batch_size=", "'auto:8'"):
        made(given)
