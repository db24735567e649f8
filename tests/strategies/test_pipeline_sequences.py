"""Pipelines whose ranks share sequences train, log, evaluate and resume as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from long_sequences import IGNORED, LongModel, by_hand, loader, rows
from messages import says
from models import silent_trainer
from ranks import run_on_ranks
from test_context_parallel import ByHandAttention, CountsRows, OwnPositions
from torch import Tensor
from torch.utils.data import DataLoader

from phalanx import AccumulationSchedule, Trainer
from phalanx.callbacks import LambdaCallback
from phalanx.errors import ConfigurationError
from phalanx.framework.core.degrees import resolve_degrees
from phalanx.strategies import PipelineStrategy

BATCH, CLIP = 8, 0.3
# The micro-batches of each window.
WINDOWS = (4, 1, 2)
STEPS = len(WINDOWS)
# Schedule, blocks of the model.
SCHEDULES = [("gpipe", 2), ("1f1b", 3), ("interleaved-1f1b", 4), ("zero-bubble", 3), ("zero-bubble-v", 4)]


def trained(
    schedule: str | None, blocks: int, ranks: int, parallel: str | None
) -> tuple[list[tuple[float, float]], dict[str, float], dict[str, Tensor]]:
    """Train on ranks, or without a schedule in one process; return the sums, the metrics and the weights held here."""
    module = LongModel(blocks=blocks)
    trainer = silent_trainer(
        strategy="single" if schedule is None else PipelineStrategy(schedule),
        devices=ranks,
        parallel=parallel,
        max_steps=STEPS,
        accumulate_grad_batches=AccumulationSchedule.cycle(WINDOWS),
        gradient_clip_val=CLIP,
        limit_train_batches=sum(WINDOWS),
        num_sanity_val_steps=0,
    )
    share = BATCH // trainer.fabric.resources.data_size
    parts = [
        [torch.stack(each) for each in zip(*part, strict=True)]
        for step, window in enumerate(WINDOWS)
        for part in chunks(rows()[step * BATCH : (step + 1) * BATCH], share // window)
    ]
    trainer.fit(module, DataLoader(parts, batch_size=None), loader(3, 7))  # type: ignore[arg-type]
    held = not any(parameter.is_meta for parameter in module.parameters())
    weights = {name: each.detach().clone() for name, each in module.named_parameters()} if held else {}
    return module.sums, {name: float(value) for name, value in trainer.callback_metrics.items()}, weights


def chunks(given: list[Any], size: int) -> list[list[Any]]:
    return [given[first : first + size] for first in range(0, len(given), size)]


def check(schedule: str, blocks: int, ranks: int, parallel: str) -> None:
    """Compare the losses, the final weights and the metrics with those of one process."""
    results = run_on_ranks(ranks, trained, schedule, blocks, ranks, parallel, timeout=120.0)
    losses, expected = by_hand(1, CLIP, STEPS, BATCH, blocks=blocks)
    layout = resolve_degrees(parallel).lay_out(ranks)
    # Ranks of a pipeline have the sums of its last stage.
    seen = [results[rank][0] for rank in range(ranks) if layout.place_of(rank)[2] == 0]
    windows = torch.tensor(seen, dtype=torch.float64).sum(0).split(WINDOWS)
    found = torch.stack([part.sum(0) for part in windows])
    torch.testing.assert_close(found[:, 0] / found[:, 1], torch.tensor(losses, dtype=torch.float64), rtol=1e-5, atol=0)
    weights = results[0][2]
    assert len(weights) == len(list(expected.parameters()))
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=2e-6)
    if layout.data_size == 1:
        single = trained(None, blocks, 1, None)[1]
        for _, metrics, _ in results:
            assert metrics == pytest.approx(single, rel=1e-5)


@pytest.mark.parametrize(("schedule", "blocks"), SCHEDULES)
def test_each_schedule_trains_parts_without_targets_as_one_process(schedule: str, blocks: int) -> None:
    # Micro-batches of two sequences, of which every other one has no target in its first part.
    check(schedule, blocks, 4, "pp=2,cp=2")


@pytest.mark.parametrize("parallel", ["pp=2,cp=2,dp_shard=2", "pp=2,cp=2,tp=2"])
def test_eight_ranks_train_as_one_process(parallel: str) -> None:
    check("1f1b", 2, 8, parallel)


# ---- resumption -----------------------------------------------------------------------------------------------------


def with_dropout(
    schedule: str, ranks: int, parallel: str, path: str, resume: bool
) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    def save(trainer: Trainer, *_: Any) -> None:
        if not resume and trainer.global_step == 2 and not Path(path).exists():
            trainer.save_checkpoint(path)

    module = LongModel(dropout=0.2, blocks=4)
    for block in module.blocks:
        block.register_forward_hook(lambda own, _, output: torch.nn.functional.dropout(output, 0.2, own.training))
    trainer = silent_trainer(
        strategy=PipelineStrategy(schedule),
        devices=ranks,
        parallel=parallel,
        max_steps=4,
        accumulate_grad_batches=2,
        gradient_clip_val=CLIP,
        callbacks=[LambdaCallback(on_train_batch_end=save)],
    )
    trainer.fit(module, loader(4), ckpt_path=path if resume else None)
    held = {name: each.detach().clone() for name, each in module.named_parameters() if not each.is_meta}
    return module.sums, held


@pytest.mark.parametrize(
    ("schedule", "ranks", "parallel"),
    [
        ("1f1b", 4, "pp=2,cp=2"),
        ("zero-bubble-v", 2, "pp=2"),
        ("1f1b", 4, "pp=2,dp_shard=2"),
        ("zero-bubble", 4, "pp=2,tp=2"),
    ],
)
def test_a_run_that_draws_random_numbers_resumes_bit_by_bit(
    schedule: str, ranks: int, parallel: str, tmp_path: Path
) -> None:
    given = (schedule, ranks, parallel, str(tmp_path / "half.ckpt"))
    whole = run_on_ranks(ranks, with_dropout, *given, False)
    again = run_on_ranks(ranks, with_dropout, *given, True)
    assert [sums for sums, _ in again] == [sums[4:] for sums, _ in whole]
    for (_, one), (_, other) in zip(whole, again, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    if "cp" in parallel:
        # Ranks 0 and 1 have the last stage, for two parts of the same sequences, whose masks differ.
        assert whole[0][0] != whole[1][0]


# ---- refusals -------------------------------------------------------------------------------------------------------


class ReturnsEarly(LongModel):
    """Does not call its blocks for a part without targets, which other parts of the sequences attend to."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.training and batch[1].eq(IGNORED).all():
            return None
        return super().training_step(batch, batch_idx)


def fitted(kind: type[LongModel]) -> None:
    trainer = silent_trainer(
        strategy="pipeline", devices=4, parallel={"pp": 2, "cp": 2}, max_steps=2, accumulate_grad_batches=2
    )
    trainer.fit(kind(), loader(2))


def refused(kind: type[LongModel]) -> str:
    try:
        fitted(kind)
    except ConfigurationError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (LongModel, "trained"),
        (ByHandAttention, "scaled_dot_product_attention"),
        (OwnPositions, "part.positions()"),
        (CountsRows, "CountsRows.batch_weight"),
    ],
)
def test_a_model_that_parts_would_train_wrongly_is_refused(kind: type[LongModel], words: str) -> None:
    says(run_on_ranks(4, refused, kind), words)


def test_a_step_that_leaves_blocks_out_for_a_part_is_refused() -> None:
    with pytest.raises(AssertionError) as caught:
        run_on_ranks(4, fitted, ReturnsEarly)
    assert "returned before it had called the blocks of the model, for a part of sequences" in str(caught.value)
