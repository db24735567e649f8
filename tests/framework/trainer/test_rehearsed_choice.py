"""The choice of ``strategy="auto"`` in a fit, by formulas and then by rehearsals of the module's own step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from long_sequences import LongModel, by_hand, loader
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor
from torch.utils.data import DataLoader

from phalanx import Trainer
from phalanx.framework.memory.available_memory import Memory
from phalanx.framework.memory.memory_plan import MemoryPlan
from phalanx.framework.trainer import auto_strategy, rehearsals
from phalanx.loggers import CSVLogger

CLIP, STEPS, ROWS, USABLE = 0.3, 2, 4, 0.9
"""A micro-batch has ``ROWS`` sequences; this part of the memory may be used."""


class DependsOnValues(LongModel):
    """The shapes of its step are those of values, which a rehearsal has not."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        weight = self.embed.weight
        nothing: Tensor = 0 * weight[weight > 0].sum()
        return loss + nothing


class Waits(LongModel):
    """Waits for a value that a loss never has; in a rehearsal all are 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        while loss.item() == 1.0:
            pass
        return loss


class Meets(LongModel):
    """Lets all ranks meet in each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        WORLDS[-1].barrier()
        return super().training_step(batch, batch_idx)


WORLDS: list[Any] = []


@dataclass
class Fitted:
    """The strategy, the layout, the notes and the losses of a fit on one rank."""

    strategy: str
    layout: str
    notes: str
    sums: list[tuple[float, float]]


def made(ranks: int, parallel: str | None, **settings: Any) -> Trainer:
    settings = {"strategy": "auto", "max_steps": STEPS, "gradient_clip_val": CLIP, **settings}
    return silent_trainer(devices=ranks, parallel=parallel, **settings)


def fitted(
    ranks: int, usable: list[int], parallel: str | None = None, kind: Callable[[], LongModel] = LongModel
) -> Fitted:
    """Fit with a number of usable bytes on each rank."""
    trainer: Any = made(ranks, parallel)
    said: list[str] = []
    trainer.note = said.append
    available = int(usable[trainer.global_rank % len(usable)] / USABLE)
    if kind is Meets:
        WORLDS.append(trainer.fabric.world)
    module = kind()
    with mock.patch.object(auto_strategy, "available_memory", return_value=Memory(available, available)):
        trainer.fit(module, loader(ROWS))
    return Fitted(trainer.strategy.name, str(trainer.fabric.resources.layout), "\n".join(said), module.sums)


def planned(ranks: int, usable: int) -> MemoryPlan:
    available = int(usable / USABLE)
    with mock.patch.object(auto_strategy, "available_memory", return_value=Memory(available, available)):
        return made(1, None).plan(LongModel(), loader(ROWS), ranks=ranks, rehearse="auto")


@cache
def counted(ranks: int, name: str, parallel: str | None = None) -> int:
    """Return the bytes that a strategy needs by formulas."""
    plan = made(1, None).plan(LongModel(), loader(ROWS), ranks=ranks, parallel=parallel)
    return plan[name].needs.device.total


@cache
def rehearsed(ranks: int, name: str, parallel: str | None = None) -> int:
    """Return the bytes that a strategy needs by a rehearsal."""
    plan = made(1, None).plan(LongModel(), loader(ROWS), ranks=ranks, parallel=parallel, rehearse=name)
    return plan[name].needs.device.total


def check_losses(found: list[Fitted], data_ranks: int, copies: int = 1) -> None:
    """Compare the losses with those of plain torch on the same global batches."""
    wanted = torch.tensor(by_hand(1, CLIP, STEPS, ROWS * data_ranks)[0], dtype=torch.float64)
    sums = torch.tensor([each.sums for each in found[::copies]], dtype=torch.float64).sum(0)
    torch.testing.assert_close(sums[:, 0] / sums[:, 1], wanted, rtol=1e-5, atol=0.0)


def line_of(name: str, text: str) -> str:
    (line,) = [line for line in text.splitlines() if line[2:].startswith(f"{name} ")]
    return line


def test_a_strategy_that_fits_by_formulas_alone_is_skipped() -> None:
    by_formulas, by_rehearsal = counted(2, "ddp"), rehearsed(2, "ddp")
    usable = (by_formulas + by_rehearsal) // 2
    assert rehearsed(2, "fsdp") < by_formulas < usable < by_rehearsal

    # The rank with the least memory decides.
    found = run_on_ranks(2, fitted, 2, [10 * usable, usable], timeout=120)

    assert [each.strategy for each in found] == ["fsdp"] * 2
    shown = found[0].notes
    assert line_of("ddp", shown).endswith("too large for the device, rehearsed")
    assert line_of("fsdp", shown).startswith("> fsdp")
    assert line_of("fsdp", shown).endswith("fits, rehearsed")
    assert "Nothing fits" not in shown
    check_losses(found, 2)
    # A plan of the same numbers shows and chooses the same.
    plan = planned(2, usable)
    assert plan.chosen == "fsdp"
    assert all(line_of(name, str(plan)).split() == line_of(name, shown).split() for name in ("ddp", "fsdp"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_first_strategy_is_kept_if_its_rehearsal_fits(ranks: int) -> None:
    name = "single" if ranks == 1 else "ddp"
    usable = rehearsed(ranks, name) + 1000

    found = run_on_ranks(ranks, fitted, ranks, [usable], timeout=120)

    assert [each.strategy for each in found] == [name] * ranks
    assert line_of(name, found[0].notes).endswith("fits, rehearsed")
    assert "rehearsed" not in line_of("fsdp", found[0].notes)
    check_losses(found, ranks)
    assert planned(ranks, usable).chosen == name


@pytest.mark.parametrize(("name", "layout"), [("ddp", "dp_replicate=2 x tp=2"), ("fsdp", "dp_shard=2 x tp=2")])
def test_degrees_that_leave_a_choice_are_decided_by_memory(name: str, layout: str) -> None:
    # Formulas count layers that are split in full.
    replicated, sharded = rehearsed(4, "ddp", "tp=2"), rehearsed(4, "fsdp", "tp=2")
    usable = replicated + 1000 if name == "ddp" else (sharded + replicated) // 2
    assert sharded < usable < counted(4, "ddp", "tp=2")

    found = run_on_ranks(4, fitted, 4, [usable], "tp=2", timeout=120)

    assert [(each.strategy, each.layout) for each in found] == [(name, layout)] * 4
    check_losses(found, 2, copies=2)


def test_degrees_that_fit_are_named_and_not_used_if_nothing_does() -> None:
    usable = rehearsed(2, "fsdp") - 1000

    found = run_on_ranks(2, searched, usable, timeout=300)

    assert [(each.strategy, each.layout) for each in found] == [("fsdp", "dp_shard=2")] * 2
    shown = found[0].notes
    assert "Nothing fits by this count; fsdp needs the least memory" in shown
    assert "fsdp with parallel='tp=2' fits: " in shown
    check_losses(found, 2)


def searched(usable: int) -> Fitted:
    """Fit with a search that a busy machine does not end early."""
    with (
        mock.patch.object(rehearsals, "_SEARCH_SECONDS", 200.0),
        mock.patch.object(rehearsals, "_MOST_SECONDS", 250.0),
    ):
        return fitted(2, [usable])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (DependsOnValues, "DynamicOutputShapeException"),
        (Waits, "TimeoutError: it takes more than 3 seconds"),
        (Meets, "A step that is rehearsed cannot communicate with ranks that are there"),
    ],
)
def test_a_module_that_cannot_be_rehearsed_is_decided_by_formulas(kind: type[LongModel], reason: str) -> None:
    usable = (counted(2, "ddp") + rehearsed(2, "ddp")) // 2

    found = run_on_ranks(2, briefly_rehearsed, [usable], kind, timeout=120)

    assert [each.strategy for each in found] == ["ddp"] * 2
    assert "ddp is counted by formulas, as it could not be rehearsed" in found[0].notes
    assert reason in found[0].notes
    assert "rehearsed" not in line_of("ddp", found[0].notes)
    check_losses(found, 2)


def briefly_rehearsed(usable: list[int], kind: type[LongModel]) -> Fitted:
    with mock.patch.object(rehearsals, "_MOST_SECONDS", 3.0 if kind is Waits else 60.0):
        return fitted(2, usable, kind=kind)


class Awkward(LongModel):
    """Makes a group of ranks, takes its batch apart, and sends values to its logger by itself."""

    def configure_model(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.new_group([0, 1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch["tokens"], batch.pop("targets")
        loss = self.loss((tokens, targets, torch.arange(tokens.shape[1])))
        logger = self.logger
        if logger is not None:
            logger.log_metrics({"own": float(loss)}, step=self.global_step)
        return loss

    def cut_sequences(self, batch: Any, part: Any) -> Any:
        return batch

    def batch_weight(self, batch: Any) -> int | Tensor:
        return len(batch["tokens"])


def awkward(usable: int, folder: str) -> tuple[str, str, int]:
    """Return the strategy of a fit, what it has said, and the number of values that its logger got in one step."""
    trainer: Any = made(2, None, max_steps=1, default_root_dir=folder, logger=CSVLogger())
    said: list[str] = []
    trainer.note = said.append
    dictionaries: Any = [
        {"tokens": tokens, "targets": targets} for tokens, targets in (next(iter(loader(ROWS))),) for _ in range(4)
    ]
    memory = Memory(int(usable / USABLE), int(usable / USABLE))
    with mock.patch.object(auto_strategy, "available_memory", return_value=memory):
        trainer.fit(Awkward(), DataLoader(dictionaries, batch_size=None))
    path = Path(trainer.logger.log_dir) / "metrics.csv"
    values = path.read_text().count("\n") - 1 if trainer.global_rank == 0 else 0
    return trainer.strategy.name, "\n".join(said), values


def test_a_rehearsed_step_leaves_no_trace(tmp_path: Path) -> None:
    results = run_on_ranks(2, awkward, 160_000, str(tmp_path), timeout=60.0)
    for _, said, _ in results:
        assert "rehearsed" in said
        assert "could not be rehearsed" not in said
    assert results[0][2] == 1
