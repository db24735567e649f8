"""Degrees of parallelism: parsed, checked against a number of ranks, and refused by strategies without the axis."""

from __future__ import annotations

from typing import Any

import pytest
from messages import refuses
from models import silent_trainer

from phalanx import Fabric
from phalanx.framework.core.degrees import Degrees, Layout, resolve_degrees
from phalanx.framework.core.errors import ConfigurationError
from phalanx.strategies import DDPStrategy, FSDPStrategy, hsdp


@pytest.mark.parametrize("given", [{"tp": 2, "dp_shard": -1}, "tp=2,dp_shard=-1", "tp=2 dp_shard=-1"])
def test_a_dict_and_a_text_are_the_same(given: Any) -> None:
    assert resolve_degrees(given) == Degrees(tp=2, dp_shard=-1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"tensor": 2}, "'tp'"),
        ({"dp_shards": 2}, "'dp_shard'"),
        ({"xyz": 2}, "'xyz'"),
        ({"tp": 0}, "'tp': 0"),
        ({"tp": True}, "'tp': "),
        ({"tp": 2.0}, "'tp': "),
        ({"ep": -1}, "'ep': -1"),
        ({"tp": -1, "cp": -1}, "tp and cp"),
        ([2, 2], "[2, 2]"),
        ("tp", "'tp'"),
        ("tp=2,tp=4", "tp=2,tp=4"),
    ],
)
def test_what_is_not_a_degree_is_refused(given: Any, words: str) -> None:
    with refuses(ConfigurationError, words):
        resolve_degrees(given)


@pytest.mark.parametrize(
    ("given", "ranks", "rest", "expected"),
    [
        ({}, 8, "dp_shard", Layout(dp_shard=8)),
        ({}, 8, "dp_replicate", Layout(dp_replicate=8)),
        ({"tp": 2}, 8, "dp_shard", Layout(dp_shard=4, tp=2)),
        ({"tp": 2, "dp_replicate": 2}, 8, "dp_shard", Layout(dp_replicate=2, dp_shard=2, tp=2)),
        ({"dp_shard": 2, "dp_replicate": -1}, 8, "dp_shard", Layout(dp_replicate=4, dp_shard=2)),
        ({"dp_shard": 2, "tp": -1}, 8, "dp_shard", Layout(dp_shard=2, tp=4)),
        ({"tp": 2, "pp": 2, "cp": 2, "ep": 2}, 16, "dp_shard", Layout(dp_shard=2, tp=2, pp=2, cp=2, ep=2)),
    ],
)
def test_ranks_are_laid_out(given: dict[str, int], ranks: int, rest: str, expected: Layout) -> None:
    layout = resolve_degrees(given).lay_out(ranks, rest)
    assert layout == expected
    assert layout.world_size == ranks


@pytest.mark.parametrize(
    ("given", "ranks", "words"),
    [
        ({"tp": 3}, 8, "tp=3"),
        ({"tp": 2, "cp": 3}, 8, "cp=3 x tp=2"),
        ({"tp": 2, "dp_shard": 2}, 8, "dp_shard=2 x tp=2"),
        ({"tp": 4}, 2, "tp out of 1, 2"),
        ({"ep": 3}, 8, "ep=3"),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_numbers_that_would(
    given: dict[str, int], ranks: int, words: str
) -> None:
    with refuses(ConfigurationError, words):
        resolve_degrees(given).lay_out(ranks, "dp_shard")


@pytest.mark.parametrize("make", [silent_trainer, lambda **given: Fabric(accelerator="cpu", **given)])
@pytest.mark.parametrize(
    ("strategy", "given", "words"),
    [
        ("zero3", {"tp": 2}, "strategy='zero3'"),
        ("single", {"tp": 2}, "strategy='single'"),
        ("ddp", {"dp_shard": 2}, "dp_shard"),
        ("ddp", {"ep": 2}, "ep"),
        (DDPStrategy(bucket_cap_mb=5), {"tp": 2}, "DDPStrategy(bucket_cap_mb=...)"),
        (FSDPStrategy(tensor_parallel=4), {"tp": 2}, "FSDPStrategy(tensor_parallel=4)"),
    ],
)
def test_a_strategy_refuses_axes_that_it_does_not_have(
    make: Any, strategy: Any, given: dict[str, int], words: str
) -> None:
    with refuses(ConfigurationError, words):
        make(strategy=strategy, devices=4, parallel=given)


@pytest.mark.parametrize(
    ("strategy", "given", "expected"),
    [
        ("fsdp", {"tp": 2}, Layout(dp_shard=2, tp=2)),
        (FSDPStrategy(tensor_parallel=2), None, Layout(dp_shard=2, tp=2)),
        (FSDPStrategy(tensor_parallel=2), {"dp_replicate": 2}, Layout(dp_replicate=2, tp=2)),
        (FSDPStrategy(replicas=2, tensor_parallel=2), {"tp": 2}, Layout(dp_replicate=2, tp=2)),
        ("hsdp", {"dp_replicate": 4}, Layout(dp_replicate=4)),
        ("ddp", {"tp": 2}, Layout(dp_replicate=2, tp=2)),
        ("ddp", {"tp": 2, "dp_replicate": -1}, Layout(dp_replicate=2, tp=2)),
        ("auto", {"tp": 2}, Layout(dp_shard=2, tp=2)),
        ("auto", {"tp": 2, "dp_replicate": -1}, Layout(dp_replicate=2, tp=2)),
    ],
)
def test_arguments_of_strategies_and_degrees_end_in_one_layout(
    strategy: Any, given: dict[str, int] | None, expected: Layout
) -> None:
    trainer = silent_trainer(strategy=strategy, devices=4, parallel=given, verbose=False)
    chosen = trainer.strategy
    assert chosen.degrees.lay_out(4, chosen.rest) == expected
    assert trainer.fabric.resources.data_size == expected.data_size


def test_a_strategy_that_is_given_as_an_object_keeps_its_own_degrees() -> None:
    own = FSDPStrategy()
    assert silent_trainer(strategy=own, devices=4, parallel={"tp": 2}).strategy.degrees == Degrees(tp=2)
    assert own.degrees == Degrees()
    assert silent_trainer(strategy=own, devices=4).strategy is own
    assert hsdp().with_degrees(Degrees(tp=2)).name == "hsdp"
