"""The search for the largest micro-batch: it is exact, all ranks agree, and nothing is left of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from exhausted import PLACES, Exhausted
from messages import refuses
from models import Regressor, regression_data, silent_trainer
from ranks import run_on_ranks
from torch.utils.data import DataLoader, IterableDataset

from phalanx.framework.core.errors import ConfigurationError, LoopError, PhalanxError
from phalanx.framework.trainer.batch_sizes import BatchSizes, BatchSizeSearch, BatchSizeTest

DATA = regression_data(64)
SEARCH = ("mode", "steps_per_trial", "init_val", "max_trials", "max_val")


class Limited(Exhausted):
    """Runs out of memory above ``largest`` samples, whichever copy runs: in the update too."""

    def _before_update(self, *_: Any) -> None:
        if self.place == "update" and self.global_rank == self.rank and self.last > self.largest:
            self.last = 0
            self.raise_error()

    last = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.last = len(batch[0])
        return super().training_step(batch, batch_idx)


def state_of(module: Any) -> dict[str, Any]:
    return {**module.state_dict(), "calls": torch.tensor(module.calls), "random": torch.get_rng_state()}


def found(place: str, rank: int, largest: int, ranks: int = 1, **settings: Any) -> tuple[BatchSizes, bool]:
    """Return the result, and whether the module and the generators are unchanged."""
    module = Limited(place, rank, largest, dropout=0.5, norm=largest > 1)
    before, numbers = state_of(module), random.getstate()
    search = {name: settings.pop(name) for name in SEARCH if name in settings}
    trainer = silent_trainer(
        **{"max_epochs": 1, "devices": ranks, "strategy": "single" if ranks == 1 else "ddp", **settings}
    )
    sizes = trainer.find_batch_size(module, DataLoader(DATA, batch_size=4, shuffle=True), **search)
    after = state_of(module)
    kept = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    return sizes, kept and numbers == random.getstate() and trainer.global_step == 0


@pytest.mark.parametrize(
    ("place", "ranks", "largest"),
    [*((place, 2, 5) for place in PLACES), ("forward", 1, 1), ("backward", 1, 13), ("update", 3, 7)],
)
def test_the_size_is_the_largest_that_fits_on_all_ranks(place: str, ranks: int, largest: int) -> None:
    arguments = (place, ranks - 1, largest, ranks)
    results = [found(*arguments)] if ranks == 1 else run_on_ranks(ranks, found, *arguments, timeout=120)

    for sizes, unchanged in results:
        assert sizes.size == largest
        assert sizes.is_largest
        assert sizes.trials == results[0][0].trials
        assert unchanged


@pytest.mark.parametrize(("init_val", "tried"), [(2, [2, 4, 8, 16]), (32, [32, 16, 8]), (3, [3, 6, 12])])
def test_power_doubles_or_halves(init_val: int, tried: list[int]) -> None:
    sizes, _ = found("backward", 0, 11, mode="power", init_val=init_val)

    assert [trial.size for trial in sizes.trials] == tried
    assert sizes.size == max(size for size in tried if size <= 11)


def test_a_batch_norm_never_gets_one_sample() -> None:
    # 64 samples are 3 times 21 and one; the halves of 25, which does not fit, are 12, 12 and one.
    sizes, _ = found("forward", 0, 21, init_val=25)

    assert [trial.size for trial in sizes.trials] == [25, 12, 18, 21, 23, 22]
    assert sizes.size == 21


@pytest.mark.parametrize(("max_val", "limit"), [(None, 64), (24, 24), (100, 64)])
def test_the_upper_limit_is_that_of_the_data_or_the_given_one(max_val: int | None, limit: int) -> None:
    sizes, _ = found("forward", 0, 1000, max_val=max_val)

    assert (sizes.size, sizes.limit, sizes.is_largest) == (limit, limit, True)
    assert "the upper limit" in str(sizes)


@pytest.mark.parametrize("place", PLACES)
def test_two_steps_of_a_trial_are_enough(place: str) -> None:
    (one, _), (other, _) = run_on_ranks(2, two_steps, place, timeout=120)
    assert one.size == other.size == 9


def two_steps(place: str) -> tuple[BatchSizes, bool]:
    return found(place, 1, 9, 2, steps_per_trial=2, max_val=16)


def test_the_data_of_a_rank_is_the_limit_on_several_ranks() -> None:
    assert [sizes.size for sizes, _ in run_on_ranks(3, found, "forward", 0, 1000, 3, timeout=120)] == [21] * 3


def test_the_search_begins_with_the_size_of_the_memory_plan() -> None:
    module = Regressor()
    trainer = silent_trainer(max_epochs=1, devices=1)
    loader = DataLoader(DATA, batch_size=4)
    plan = trainer.plan(module, loader)
    assert plan.activations is not None

    # A model as small as this one fits with all samples.
    assert [trial.size for trial in trainer.find_batch_size(module, loader).trials] == [64]


def test_the_budget_of_trials_ends_the_search() -> None:
    sizes, _ = found("forward", 0, 11, init_val=2, max_trials=3)

    assert sizes.size == 8
    assert not sizes.is_largest
    assert str(sizes) == ("Micro-batch size 8, the last size that was tried. 3 trials: 2 fits, 4 fits, 8 fits.")
    with refuses(ConfigurationError, "max_trials=1"):
        found("forward", 0, 11, init_val=64, max_trials=1)


class Remembered(Limited):
    """Runs out of memory if there are gradients, as in all but the first micro-batch of a window."""

    def _is_short(self, samples: int) -> bool:
        return samples + (4 if self.net[0].weight.grad is not None else 0) > self.largest


def test_gradients_of_former_micro_batches_count() -> None:
    module = Remembered("forward", 0, 11)
    trainer = silent_trainer(max_epochs=1, devices=1)

    assert trainer.find_batch_size(module, DataLoader(DATA, batch_size=4)).size == 7


def test_one_sample_that_is_too_large_is_an_error_on_all_ranks() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="injected"):
        found("forward", 0, 0)
    assert run_on_ranks(2, error_of, timeout=120) == ["LoopError", "OutOfMemoryError"]


def error_of() -> str:
    try:
        found("forward", 1, 0, 2)
    except (LoopError, torch.OutOfMemoryError) as error:
        return type(error).__name__
    return "none"


@pytest.mark.parametrize(
    ("largest", "limit", "first", "mode"),
    [
        (largest, limit, first, mode)
        for largest in (1, 2, 5, 16, 31)
        for limit in (1, 5, 31)
        for first in (1, 2, 16, 31)
        for mode in ("binsearch", "power")
    ],
)
def test_the_search_ends_with_the_largest_size(largest: int, limit: int, first: int, mode: str) -> None:
    search = BatchSizeSearch(BatchSizeTest(mode=mode), limit)
    for size in search.sizes(first):
        reached = size
        if size > largest:
            reached = size // 2
        search.record(size, reached)

    sizes = search.result()
    best = min(largest, limit)
    assert sizes.size == best if mode == "binsearch" else sizes.size <= best < 2 * sizes.size + 2
    assert len({trial.size for trial in sizes.trials}) == len(sizes.trials) <= 10


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"mode": "log"}, "mode='log'"),
        ({"steps_per_trial": 1}, "steps_per_trial=1"),
        ({"steps_per_trial": None}, "steps_per_trial=None"),
        ({"init_val": 0}, "init_val=0"),
        ({"max_trials": 0}, "max_trials=0"),
        ({"init_val": 8, "max_val": 4}, "init_val=8"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, Any], name: str) -> None:
    with refuses(PhalanxError, name):
        silent_trainer(max_epochs=1, devices=1).find_batch_size(Regressor(), DataLoader(DATA), **arguments)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(DATA)


def test_what_cannot_be_searched_is_refused() -> None:
    trainer = silent_trainer(max_epochs=1, devices=1)
    with refuses(ConfigurationError, "find_batch_size", "map-style"):
        trainer.find_batch_size(Regressor(), DataLoader(Stream(), batch_size=4))
    with refuses(ConfigurationError, "find_batch_size", "strategy='zero3'"):
        silent_trainer(max_epochs=1, devices=1, strategy="zero3").find_batch_size(Regressor(), DataLoader(DATA))
