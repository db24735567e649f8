"""Predictions, triggers, losses that are not finite, and kills in runs of pipelines."""

from __future__ import annotations

import io
import math
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import pytest
import torch
from language_model import LanguageModel, token_loader, tokens
from models import plain_steps, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Callback
from phalanx.errors import NonFiniteError
from phalanx.strategies import PipelineStrategy

SHARDED = "pp=2,dp_shard=2"
MESHES = [(2, "pp=2"), (4, SHARDED)]


def pipelined(ranks: int = 2, schedule: str = "1f1b", parallel: str = "pp=2", **settings: Any) -> Any:
    strategy = PipelineStrategy(schedule)
    arguments = {"accumulate_grad_batches": 4, "max_steps": 4, **settings}
    return silent_trainer(devices=ranks, strategy=strategy, parallel=parallel, **arguments)


class Plain(LanguageModel):
    """Is trained by SGD, validates and predicts."""

    def __init__(self) -> None:
        super().__init__(blocks=4)

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val", loss, batch_size=len(batch))
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        best: Tensor = self(batch).argmax(-1)
        return best

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3)


def rows_loader(count: int = 14) -> DataLoader[Any]:
    return DataLoader(tokens(count, seed=9), batch_size=4)  # type: ignore[arg-type]


# ---- evaluation ----------------------------------------------------------------------------------------------------


def evaluated(ranks: int, schedule: str, parallel: str) -> tuple[float, list[Any]]:
    trainer = pipelined(ranks, schedule, parallel)
    module = Plain()
    (metrics,) = trainer.validate(module, rows_loader(), verbose=False)
    return metrics["val"], trainer.predict(Plain(), rows_loader())


@pytest.mark.parametrize(
    ("ranks", "schedule", "parallel"),
    [
        (2, "1f1b", "pp=2"),
        (2, "interleaved-1f1b", "pp=2"),
        (2, "zero-bubble-v", "pp=2"),
        (4, "1f1b", "pp=2"),
        (4, "1f1b", SHARDED),
        (4, "interleaved-1f1b", "pp=2,tp=2"),
    ],
)
def test_evaluation_and_prediction_without_a_fit_are_those_of_one_process(
    ranks: int, schedule: str, parallel: str
) -> None:
    module, rows = Plain(), tokens(14, seed=9)
    for value, outputs in run_on_ranks(ranks, evaluated, ranks, schedule, parallel):
        assert value == pytest.approx(module.loss(rows).item(), rel=1e-5)
        assert torch.equal(torch.cat(outputs), module(rows).argmax(-1))


# ---- waiting of ranks ------------------------------------------------------------------------------------------------


def shown(window: int, schedule: str) -> str:
    text = io.StringIO()
    with redirect_stdout(text), redirect_stderr(text):
        pipelined(2, schedule, accumulate_grad_batches=window, max_steps=1).fit(Plain(), token_loader(16, batch_size=2))
    return text.getvalue()


def test_waiting_of_ranks_is_shown_once_at_the_start() -> None:
    first, second = run_on_ranks(2, shown, 1, "1f1b")
    assert first.count("windows of 1 micro-batch for a pipeline of 2 ranks") == 1
    assert "waits 50% of the time" in first
    assert "a pipeline of" not in second + run_on_ranks(2, shown, 2, "1f1b")[0]


# ---- losses, hooks and stops ---------------------------------------------------------------------------------------


class Seen(Callback):
    """Notes what the hooks of a batch are given; requests a stop on the last rank after two steps."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append((batch_idx, float(outputs["loss"])))
        if trainer.global_rank == trainer.world_size - 1 and trainer.global_step == 2:
            trainer.should_stop = True


def hooked() -> tuple[list[tuple[int, float]], list[float], int]:
    module, seen = Plain(), Seen()
    trainer = pipelined(2, callbacks=[seen])
    trainer.fit(module, token_loader(64, batch_size=2))
    return seen.ends, module.losses, trainer.global_step


def test_hooks_get_each_loss_on_all_ranks_and_any_rank_stops_the_run() -> None:
    (first, losses, steps), (second, none, _) = run_on_ranks(2, hooked)

    assert steps in (2, 3)
    assert [index for index, _ in first] == list(range(4 * steps)) == [index for index, _ in second]
    assert [loss for _, loss in first] == pytest.approx(losses)
    assert [loss for _, loss in second] == pytest.approx(losses)
    assert none == losses


class Broken(Plain):
    """Has a loss that is not a number in one micro-batch of the second window."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * math.nan if batch_idx == 5 else loss


def broken(policy: str, ranks: int, parallel: str) -> tuple[str, list[float], int]:
    module = Broken()
    trainer = pipelined(ranks, parallel=parallel, nonfinite=policy)
    try:
        trainer.fit(module, token_loader(64, batch_size=2))
    except NonFiniteError as error:
        return str(error), [], trainer.global_step
    held = [each for each in module.parameters() if not each.is_meta]
    return "", [float(each.detach().abs().sum()) for each in held], trainer.global_step


@pytest.mark.parametrize(("ranks", "parallel"), MESHES)
def test_a_loss_that_is_not_finite_raises_or_skips_on_all_ranks(ranks: int, parallel: str) -> None:
    for message, _, steps in run_on_ranks(ranks, broken, "raise", ranks, parallel):
        assert "nan" in message
        assert steps == 1
    for _, sums, steps in run_on_ranks(ranks, broken, "skip", ranks, parallel):
        assert all(map(math.isfinite, sums))
        assert steps == 4


def in_mixed_precision(precision: str, ranks: int, parallel: str) -> list[float]:
    module = Plain()
    trainer = pipelined(ranks, parallel=parallel, precision=precision)
    trainer.fit(module, token_loader(32, batch_size=2 // trainer.fabric.resources.data_size))
    return module.losses


@pytest.mark.parametrize(
    ("precision", "ranks", "parallel"),
    [("bf16-mixed", 2, "pp=2"), ("16-mixed", 4, SHARDED), ("bf16-mixed", 4, "pp=2,tp=2")],
)
def test_mixed_precision_trains_close_to_fp32(precision: str, ranks: int, parallel: str) -> None:
    module = Plain()
    losses = plain_steps(module.configure_optimizers(), module.loss, tokens(32).split(8))
    results = [losses for losses in run_on_ranks(ranks, in_mixed_precision, precision, ranks, parallel) if losses]
    found = torch.tensor(results).mean(0).view(-1, 4).mean(1)
    torch.testing.assert_close(found, torch.tensor(losses), rtol=2e-2, atol=0)


class NormedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32)

    def forward(self, hidden: Tensor) -> Tensor:
        # Not contiguous.
        normed: Tensor = self.norm(self.linear(hidden).mT).mT
        return normed


class Normed(Plain):
    """Has batch norm before, in and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.before, self.after = nn.BatchNorm1d(32), nn.BatchNorm1d(32)
            self.blocks = nn.ModuleList(NormedBlock() for _ in range(4))

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.before(self.embed(rows).mT).mT
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.after(hidden.mT).mT)
        return logits


def normed(ranks: int) -> dict[str, Tensor] | None:
    module = Normed()
    settings: dict[str, Any] = {"accumulate_grad_batches": 4, "max_steps": 4}
    trainer = silent_trainer(devices=1, **settings) if ranks == 1 else pipelined(ranks)
    trainer.fit(module, token_loader(64, batch_size=2))
    return None if any(each.is_meta for each in module.parameters()) else dict(module.named_buffers())


def test_running_statistics_are_those_of_one_process() -> None:
    (expected,), (found, _) = run_on_ranks(1, normed, 1), run_on_ranks(2, normed, 2)

    assert len(expected) > 12
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
