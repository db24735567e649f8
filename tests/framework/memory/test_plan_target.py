"""Plans for other machines, changes that make a run fit, and the bytes that a step sends."""

from __future__ import annotations

from typing import Any

import pytest
from messages import refuses
from models import Regressor, loader, silent_trainer

from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.core.precision import resolve_precision
from phalanx.framework.memory.available_memory import Memory, gpu_libraries
from phalanx.framework.memory.communication import Transfer, communication
from phalanx.framework.memory.formulas import ModelSize, Ranks
from phalanx.framework.memory.measure import Activations
from phalanx.framework.memory.memory_plan import MemoryPlan, TrainingData, alternatives, counted_layouts, make_plan

FP32, BF16 = resolve_precision("32-true"), resolve_precision("bf16-mixed")
N, MB = 1_000_000, 10**6
LAYOUTS = counted_layouts()
GATHER, SCATTER, REDUCE = "all-gather", "reduce-scatter", "all-reduce"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_plan_for_other_ranks_is_that_of_a_trainer_with_them(ranks: int) -> None:
    own = silent_trainer(devices=ranks).plan(Regressor(), loader())
    other = silent_trainer(devices=3 if ranks != 3 else 1).plan(Regressor(), loader(), ranks=ranks)
    assert {row.name: row.needs for row in other} == {row.name: row.needs for row in own}
    assert {row.name: row.refusal for row in other} == {row.name: row.refusal for row in own}
    assert (other.world_size, other.local_size, other.chosen) == (ranks, own.local_size, own.chosen)
    assert other.data == own.data


def test_the_memory_of_a_plan_is_that_of_the_machines() -> None:
    plan = silent_trainer().plan(Regressor(), loader(), ranks=16, device_memory="80GB", host_memory="1TB")
    assert (plan.local_size, plan.device_type, plan.memory.device_is_host) == (8, "cuda", False)
    assert plan.memory.device == 80 * 10**9 - gpu_libraries(8)
    assert plan.memory.host == 10**12 // 8
    cpu = silent_trainer().plan(Regressor(), loader(), ranks=4, ranks_per_node=2, host_memory="64GiB")
    assert (cpu.local_size, cpu.device_type) == (2, "cpu")
    assert cpu.memory.device == cpu.memory.host == 32 * 2**30


def test_strategies_are_checked_for_the_devices_of_the_machines() -> None:
    trainer = silent_trainer(precision="16-mixed")
    here = trainer.plan(Regressor(), loader(), ranks=8)
    there = trainer.plan(Regressor(), loader(), ranks=8, device_memory="80GB")
    assert "16-mixed" in (here["zero2"].refusal or "")
    assert there["zero2"].refusal is None


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 12}, "ranks=12"),
        ({"ranks": 6, "ranks_per_node": 4}, "ranks=6"),
        ({"device_memory": "80 apples"}, "device_memory='80 apples'"),
        ({"host_memory": 0}, "host_memory=0"),
    ],
)
def test_wrong_machines(arguments: dict[str, Any], name: str) -> None:
    with refuses(ConfigurationError, name):
        silent_trainer().plan(Regressor(), loader(), **arguments)


def test_the_ranks_of_the_trainer_must_fill_the_nodes() -> None:
    trainer = silent_trainer(devices=4)
    with refuses(ConfigurationError, "ranks=4"):
        trainer.plan(Regressor(), loader(), ranks_per_node=3)
    plan = trainer.plan(Regressor(), loader(), ranks_per_node=2)
    assert (plan.world_size, plan.local_size) == (4, 2)
    # Without another number, those of a node are the Trainer's: 8 do not divide them.
    plan = silent_trainer(devices=12).plan(Regressor(), loader(), host_memory="64GiB")
    assert (plan.world_size, plan.local_size) == (12, 12)


@pytest.mark.parametrize(
    ("name", "ranks", "window", "expected"),
    [
        ("single", Ranks(1), 4, []),
        ("ddp", Ranks(4), 4, [(REDUCE, 1, 2 * 4 * N * 3 // 4)]),
        ("fsdp", Ranks(4), 2, [(GATHER, 4, 4 * 4 * N * 3 // 4), (SCATTER, 1, 4 * N * 3 // 4)]),
        ("hsdp", Ranks(8, 4), 1, [(GATHER, 2, 2 * 4 * N * 3 // 4), (SCATTER, 1, 4 * N * 3 // 4), (REDUCE, 1, N)]),
        ("zero1", Ranks(4), 4, [(SCATTER, 1, 4 * N * 3 // 4), (GATHER, 1, 4 * N * 3 // 4)]),
        ("zero2", Ranks(4), 4, [(SCATTER, 4, 4 * 4 * N * 3 // 4), (GATHER, 1, 4 * N * 3 // 4)]),
        ("zero3", Ranks(4), 2, [(GATHER, 4, 4 * 4 * N * 3 // 4), (SCATTER, 2, 2 * 4 * N * 3 // 4)]),
    ],
)
def test_bytes_that_a_step_sends(name: str, ranks: Ranks, window: int, expected: list[tuple[str, int, int]]) -> None:
    found = communication(LAYOUTS[name], ModelSize(N), ranks, FP32, window)
    assert [(each.operation, each.times, each.sent) for each in found] == expected


def test_mixed_precision_gathers_and_reduces_in_its_own_types() -> None:
    gather, scatter = communication(LAYOUTS["fsdp"], ModelSize(N, frozen=N), Ranks(2), BF16)
    # Frozen parameters are gathered too, and have no gradients.
    assert gather == Transfer(GATHER, "parameters", 2, 2 * 2 * 2 * N // 2)
    assert scatter.sent == BF16.reduction_dtype.itemsize * N // 2


def plan_on(ranks: int, megabytes: int, kept: int = 0, micro_batch: int | None = 32) -> MemoryPlan:
    """Return a plan for a model of a million elements under Adam on devices of a memory."""
    memory = Memory(megabytes * MB, 10**12, 0, device_is_host=False)
    data = TrainingData(micro_batch)
    return make_plan(LAYOUTS, ModelSize(N), Ranks(ranks), FP32, "cuda", memory, Activations(kept, 0), {}, data=data)


def test_changes_that_make_a_run_fit_are_enough_and_the_least() -> None:
    plan = plan_on(2, 14)
    assert not plan["fsdp"].fits
    found = alternatives(plan, "fsdp", FP32)
    assert found.ranks is not None
    assert found.ranks > 2
    assert plan_on(found.ranks, 14)["fsdp"].fits
    assert not plan_on(found.ranks // 2, 14)["fsdp"].fits
    assert set(found.strategies) == {row.name for row in plan if row.fits}
    assert found.micro_batch is None


def test_a_smaller_micro_batch_takes_its_part_of_the_activations() -> None:
    plan = plan_on(1, 30, kept=64 * MB)
    assert not plan["single"].fits
    size = alternatives(plan, "single", FP32).micro_batch
    assert size is not None
    assert plan_on(1, 30, kept=size * 2 * MB)["single"].fits
    assert not plan_on(1, 30, kept=2 * size * 2 * MB)["single"].fits
    assert alternatives(plan_on(1, 30, 64 * MB, None), "single", FP32).micro_batch is None
    assert alternatives(plan_on(1, 30, 64 * MB, 1), "single", FP32).micro_batch is None


def test_a_step_that_cannot_be_rehearsed_is_counted_by_formulas() -> None:
    class DependsOnValues(Regressor):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss + batch[0][batch[0] > 0].sum()

    trainer = silent_trainer()
    counted = trainer.plan(DependsOnValues(), loader(), ranks=4)
    plan = trainer.plan(DependsOnValues(), loader(), ranks=4, rehearse="ddp")
    assert (plan["ddp"].rank, plan["ddp"].needs) == (None, counted["ddp"].needs)
    assert "ddp is counted by formulas, as it could not be rehearsed" in plan.notes[-1]


def test_the_engine_of_a_strategy_is_counted_by_formulas() -> None:
    plan = silent_trainer().plan(Regressor(), loader(), ranks=4, rehearse="zero2")
    assert plan["zero2"].rank is None
    assert any("zero2 is counted by formulas" in note for note in plan.notes) or plan["zero2"].refusal is not None


def test_a_rehearsed_row_is_named_in_the_table() -> None:
    plan = silent_trainer().plan(Regressor(), loader(), ranks=4, rehearse="fsdp")
    assert plan["fsdp"].rank == 0
    assert plan["fsdp"].traffic
    (line,) = [line for line in str(plan).splitlines() if "fsdp" in line]
    assert line.endswith("fits, rehearsed")
