"""The step of one rank among many: its peak memory and its collectives, in one process and on ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_on_ranks
from rehearsal_table import CASES, TOLERANCE, Case, Model, counts_of, measured, rehearsed
from torch import Tensor

from phalanx.framework.core.degrees import resolve_degrees
from phalanx.framework.core.precision import resolve_precision
from phalanx.framework.core.registry import STRATEGIES
from phalanx.framework.rehearsal.one_rank import Part, Rehearsed, rehearse

# The whole table is that of `python tests/rehearsal_table.py`.
SHORT = ("ddp@2", "fsdp tp=2@2", "fsdp cp=2@2", "pipeline pp=2@2", "fsdp ep=2@2, 8 experts")


@pytest.mark.parametrize("case", [each for each in CASES if str(each) in SHORT], ids=str)
def test_a_rehearsal_is_what_two_ranks_measure(case: Case) -> None:
    found = rehearsed(case)
    real = run_on_ranks(2, measured, case)
    assert found.peak.total == pytest.approx(max(peak for peak, _ in real), rel=TOLERANCE)
    assert counts_of(found) == real[found.rank][1]


class Short(Model):
    """The model with two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:2]


def test_a_rehearsal_leaves_no_group_and_the_module_as_it_was() -> None:
    module = Model()
    before = {name: each.detach().clone() for name, each in module.named_parameters()}
    _rehearsed(module, "fsdp", 4)
    assert not dist.is_initialized()
    assert "rehearsal" not in vars(dist)["Reducer"].__module__
    assert all(torch.equal(each, before[name]) for name, each in module.named_parameters())
    assert all(each.grad is None for each in module.parameters())


def test_many_ranks_hold_parts_of_the_state() -> None:
    total = sum(each.nbytes for each in Model().parameters())
    found = _rehearsed(Model(), "fsdp", 32)
    assert found.peak.parameters == total / 32
    # Two moments, and a step counter for each parameter.
    assert found.peak.optimizer_state == pytest.approx(2 * total / 32, rel=0.01)
    assert {(each.axis, each.ranks) for each in found.traffic} == {("dp_shard", 32)}


def test_what_tensor_parallelism_splits_counts_in_part() -> None:
    whole, split = _rehearsed(Model(), "ddp", 8), _rehearsed(Model(), "ddp", 8, "tp=4")
    blocks = sum(each.nbytes for each in Model().blocks.parameters())
    assert whole.peak.parameters - split.peak.parameters > blocks / 2
    assert whole.peak.activations > split.peak.activations
    assert {each.axis for each in split.traffic} == {"tp", "dp_replicate"}


@pytest.mark.parametrize(("name", "parallel"), [("fsdp", None), ("ddp", "tp=2")])
def test_each_micro_batch_of_a_long_window_adds_the_same_collectives(name: str, parallel: str | None) -> None:
    four, five, eight = (counts_of(_rehearsed(Short(), name, 4, parallel, window=size)) for size in (4, 5, 8))
    for kind, (times, size) in eight.items():
        assert times == five[kind][0] + 3 * (five[kind][0] - four[kind][0])
        assert size == five[kind][1] + 3 * (five[kind][1] - four[kind][1])


def test_the_stage_that_holds_most_is_reported() -> None:
    found = _rehearsed(Model(), "pipeline", 4, "pp=2", window=4)
    # The first stage keeps the hidden states of both micro-batches in flight; the last one is on the first rank.
    assert found.rank == 1


def test_a_step_that_reads_numbers_can_be_rehearsed() -> None:
    class Reads(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            assert isinstance(loss.item(), float)
            return loss

    assert _rehearsed(Reads(), "ddp", 2).peak.total > 0


def test_layers_that_configure_model_builds_take_no_memory() -> None:
    class Large(Short):
        def configure_model(self) -> None:
            # 4 TB.
            self.large = torch.nn.Linear(2**20, 2**20, bias=False)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            extra: Tensor = self.large(torch.ones(1, 2**20)).sum()
            return super().training_step(batch, batch_idx) + extra

    found = _rehearsed(Large(), "fsdp", 1024)
    assert found.peak.parameters > 2**32


def _rehearsed(module: Model, name: str, ranks: int, parallel: str | None = None, window: int = 1) -> Rehearsed:
    strategy = STRATEGIES.load(name)().with_degrees(resolve_degrees(parallel))
    precision = resolve_precision("32-true")
    strategy.check(ranks, "cpu", 1, precision)
    batch = (torch.zeros(4, 32, dtype=torch.long), torch.zeros(4, 32, dtype=torch.long))
    return rehearse(strategy, Part(module, batch, precision, window), ranks)
