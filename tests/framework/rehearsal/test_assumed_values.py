"""Rehearsals of steps whose shapes depend on values: mixtures of experts, and masks of the batch."""

from __future__ import annotations

from collections.abc import Callable
from math import comb
from typing import Any

import pytest
import torch
from long_sequences import WIDTH, Experts, LongModel, loader
from models import silent_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import TrainModule
from phalanx.framework.core.degrees import resolve_degrees
from phalanx.framework.core.precision import resolve_precision
from phalanx.framework.core.registry import STRATEGIES
from phalanx.framework.rehearsal.assumed_values import balanced_choices
from phalanx.framework.rehearsal.one_rank import Part, Rehearsed, rehearse

ROWS = 56


@pytest.mark.parametrize(("total", "count"), [(4, 1), (8, 2), (8, 3), (8, 8), (64, 6), (128, 8)])
def test_choices_are_balanced_and_meet_groups_as_often_as_random_ones(total: int, count: int) -> None:
    rows = 4 * total * (total - 1)
    choices = balanced_choices(rows, total, count)
    assert choices.shape == (rows, count)
    assert all(len(set(row)) == count for row in choices[:: total + 1].tolist())
    assert choices.flatten().bincount(minlength=total).tolist() == [rows * count // total] * total
    for group in (total // 2, total // 4):
        met = (choices.div(group, rounding_mode="floor") == 0).any(1).double().mean()
        assert float(met) == pytest.approx(1 - comb(total - group, count) / comb(total, count), rel=0.02)


class Chooses(TrainModule):
    """Computes with tokens that a function chooses by the scores of a layer, and notes how many there are."""

    seen: list[Any]

    def __init__(self, choose: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.scores, self.layer, self.choose = nn.Linear(16, 8), nn.Linear(16, 16), choose

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, padded = batch
        chosen = self.choose(self.scores(hidden), hidden, padded)
        Chooses.seen.append(tuple(chosen.shape))
        loss: Tensor = self.layer(chosen).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def by_counts(scores: Tensor, hidden: Tensor, padded: Tensor) -> Any:
    """Sort tokens by expert, and return those of the second one, by the counts of all."""
    index = scores.topk(2).indices.flatten()
    counts = index.bincount(minlength=8).tolist()
    parts = hidden[index.argsort().div(2, rounding_mode="floor")].split(counts)
    return parts[1]


def by_loop(scores: Tensor, hidden: Tensor, padded: Tensor) -> Tensor:
    """Return the tokens of the first expert that has any."""
    index = scores.argmax(-1)
    found = next(each for each in range(8) if (index == each).any())
    return hidden[(index == found).nonzero().squeeze(1)]


@pytest.mark.parametrize(
    ("choose", "rows"),
    [
        (by_counts, ROWS * 2 // 8),
        (by_loop, ROWS // 8),
        (lambda scores, hidden, padded: hidden[scores.max(1).indices < 4], ROWS // 2),
        (lambda scores, hidden, padded: hidden[torch.where(scores.topk(3).indices.eq(0))[0]], ROWS * 3 // 8),
        # Whole numbers of the batch are known.
        (lambda scores, hidden, padded: hidden[~padded], 40),
        (lambda scores, hidden, padded: hidden.masked_select(padded[:, None]).view(-1, 16), 16),
        (lambda scores, hidden, padded: hidden[: padded.logical_not().sum().item()], 40),
    ],
)
def test_numbers_of_rows_are_those_of_a_balanced_router(choose: Any, rows: int) -> None:
    Chooses.seen = []
    batch = torch.randn(ROWS, 16), torch.arange(ROWS) >= 40
    assert rehearsed(Chooses(choose), "ddp", 2, batch).peak.total > 0
    assert set(Chooses.seen) == {(rows, 16)}


def test_what_is_chosen_by_unknown_values_is_not_rehearsed() -> None:
    batch = torch.randn(ROWS, 16), torch.arange(ROWS) >= 40
    with pytest.raises(Exception, match=r"nonzero|index"):
        rehearsed(Chooses(lambda scores, hidden, padded: hidden[scores[:, 0] > 0]), "ddp", 2, batch)


@pytest.mark.parametrize(
    ("ranks", "parallel", "axes"),
    [(8, "ep=4", {"ep"}), (8, "ep=2,tp=2", {"ep"}), (4, "ep=2,cp=2", {"cp", "ep"}), (2, "ep=2,cp=2", {"cp, ep"})],
)
def test_the_exchange_of_tokens_has_the_name_of_its_axis(ranks: int, parallel: str, axes: set[str]) -> None:
    found = rehearsed(LongModel(experts=8, blocks=1), "fsdp", ranks, next(iter(loader(8))), parallel)
    assert {each.axis for each in found.traffic if each.operation == "all-to-all"} == axes


class Large(TrainModule):
    """Has experts that take most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 32), Experts(32)

    def configure_expert_parallel(self) -> list[str]:
        return ["experts"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights, index = self.router(batch).softmax(-1).topk(2)
        mixed: Tensor = self.experts(batch, index, weights)
        return mixed.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_a_plan_rehearses_and_proposes_degrees_for_experts() -> None:
    trainer, data = silent_trainer(devices=2), DataLoader(torch.randn(64, WIDTH), 4)  # type: ignore[var-annotated,arg-type]
    row = trainer.plan(Large(), data, ranks=8, parallel={"ep": 8}, rehearse="fsdp")["fsdp"]
    assert {(each.axis, each.ranks) for each in row.traffic if each.operation == "all-to-all"} == {("ep", 8)}
    memory = 8 * int(1.3 * row.needs.device.total)
    small = trainer.plan(Large(), data, ranks=8, ranks_per_node=8, host_memory=memory, rehearse="fsdp")
    assert not small["fsdp"].fits
    assert "ep=8" in " ".join(small.notes)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_models_of_transformers_are_rehearsed(implementation: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip

    class Language(TrainModule):
        def __init__(self) -> None:
            super().__init__()
            self.net: Any = transformers.MixtralForCausalLM(config)
            self.net.set_experts_implementation(implementation)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss: Tensor = self.net(input_ids=batch, labels=batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    tokens = torch.zeros(4, 12, dtype=torch.long)
    for parallel in (None, "ep=4") if implementation == "eager" else ("ep=4",):
        assert rehearsed(Language(), "fsdp", 4, tokens, parallel).peak.activations > 0


def rehearsed(module: TrainModule, name: str, ranks: int, batch: Any, parallel: str | None = None) -> Rehearsed:
    strategy = STRATEGIES.load(name)().with_degrees(resolve_degrees(parallel))
    precision = resolve_precision("32-true")
    strategy.check(ranks, "cpu", 1, precision)
    return rehearse(strategy, Part(module, batch, precision), ranks)
