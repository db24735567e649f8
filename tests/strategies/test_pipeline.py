"""Pipelines train what one process of plain torch trains: every schedule, replicas, uneven windows, evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_model import LanguageModel, adamw, token_loader, tokens
from models import silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import TrainModule
from phalanx.framework.core.degrees import resolve_degrees
from phalanx.strategies import PipelineStrategy

STEPS, GLOBAL_BATCH, CLIP = 20, 8, 0.5
ROWS = GLOBAL_BATCH * STEPS
# Schedule, blocks of the model (five are not divided evenly).
SCHEDULES = [("gpipe", 4), ("1f1b", 5), ("interleaved-1f1b", 4), ("zero-bubble", 4), ("zero-bubble-v", 5)]


def trainer_on(ranks: int, schedule: str, parallel: str, **settings: Any) -> Any:
    strategy = PipelineStrategy(schedule)
    return silent_trainer(devices=ranks, strategy=strategy, parallel=parallel, **settings)


def trained(schedule: str, blocks: int, ranks: int, parallel: str, window: int) -> tuple[list[float], float | None]:
    module = LanguageModel(blocks=blocks)
    settings = {"max_steps": STEPS, "accumulate_grad_batches": window, "gradient_clip_val": CLIP}
    trainer = trainer_on(ranks, schedule, parallel, **settings)
    shards = trainer.fabric.resources.data_size
    trainer.fit(module, token_loader(ROWS, batch_size=GLOBAL_BATCH // shards // window))
    losses = list(module.losses)
    return losses, None if is_partial(module) else module.loss(tokens(64, seed=5)).item()


def is_partial(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def by_hand(blocks: int) -> tuple[list[float], float]:
    module, rows = LanguageModel(blocks=blocks), tokens(ROWS)
    optimizer, losses = adamw(module, module.lr), []
    for batch in rows.split(GLOBAL_BATCH):
        optimizer.zero_grad()
        loss = module.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses, module.loss(tokens(64, seed=5)).item()


def check(schedule: str, blocks: int, ranks: int, parallel: str, window: int) -> None:
    """Compare the losses of all steps, and that of the final weights, with those of plain torch."""
    results = run_on_ranks(ranks, trained, schedule, blocks, ranks, parallel, window, timeout=120.0)
    layout = resolve_degrees(parallel).lay_out(ranks)
    # The first rank of each pipeline computes the losses, and rank 0 has all weights in the end.
    of_pipelines = [torch.tensor(losses).view(-1, window).mean(1) for losses, _ in results[:: layout.copies]]
    losses, final = by_hand(blocks)
    torch.testing.assert_close(torch.stack(of_pipelines).mean(0), torch.tensor(losses), rtol=1e-5, atol=0)
    assert results[0][1] == pytest.approx(final, rel=1e-5)
    # The list that the step appends to is that of the last stage on all ranks of a pipeline.
    firsts = [results[rank - rank % layout.copies] for rank in range(ranks)]
    assert [losses for losses, _ in results] == [losses for losses, _ in firsts]


@pytest.mark.parametrize(("schedule", "blocks"), SCHEDULES)
def test_each_schedule_trains_as_one_process(schedule: str, blocks: int) -> None:
    check(schedule, blocks, 2, "pp=2", 4)


@pytest.mark.parametrize(
    ("schedule", "pp", "window"), [("1f1b", 2, 2), ("1f1b", 4, 8), ("gpipe", 2, 4), ("zero-bubble", 4, 4)]
)
def test_four_ranks_train_as_one_process(schedule: str, pp: int, window: int) -> None:
    check(schedule, 4, 4, f"pp={pp},dp_replicate={4 // pp}", window)


@pytest.mark.parametrize(("schedule", "blocks"), SCHEDULES)
def test_a_window_of_one_micro_batch_trains_as_one_process(schedule: str, blocks: int) -> None:
    check(schedule, blocks, 2, "pp=2", 1)


@pytest.mark.parametrize(("schedule", "window"), [("1f1b", 2), ("zero-bubble", 1)])
def test_a_window_smaller_than_the_pipeline_trains_as_one_process(schedule: str, window: int) -> None:
    check(schedule, 4, 4, "pp=4", window)


@pytest.mark.parametrize(("schedule", "blocks"), SCHEDULES)
def test_sharded_stages_train_as_one_process(schedule: str, blocks: int) -> None:
    check(schedule, blocks, 4, "pp=2,dp_shard=2", 4 if schedule != "1f1b" else 1)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-v"])
def test_stages_of_split_layers_train_as_one_process(schedule: str) -> None:
    check(schedule, 4, 4, "pp=2,tp=2", 4)


def test_stages_that_are_split_and_sharded_train_as_one_process() -> None:
    check("1f1b", 2, 8, "pp=2,tp=2,dp_shard=2", 4)


# ---- windows of uneven weights and shapes ---------------------------------------------------------------------------


class Weighted(LanguageModel):
    """Weighs batches by their tokens, and notes what it is given."""

    def batch_weight(self, batch: Any) -> float:
        return float(batch.numel() - len(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch], batch_idx) if batch_idx != 2 else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), batch_size=len(batch))
        self.log("rows", float(len(batch)), reduce_fx="sum")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Adam would blow up the rounding of gradients that are zero.
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def ragged() -> list[Tensor]:
    """Return 13 batches of several lengths and sizes: windows of 5, the last one short."""
    rows = tokens(64, seed=3)
    shapes = [
        (4, 12),
        (4, 12),
        (4, 12),
        (2, 12),
        (3, 7),
        (4, 12),
        (4, 9),
        (4, 9),
        (1, 12),
        (4, 12),
        (4, 5),
        (2, 5),
        (3, 3),
    ]
    return [rows[number : number + size, :length] for number, (size, length) in enumerate(shapes)]


def trained_ragged(parallel: str, ranks: int) -> tuple[Tensor | None, dict[str, float]]:
    module = Weighted(blocks=4)
    trainer = trainer_on(ranks, "1f1b", parallel, max_epochs=2, accumulate_grad_batches=5, gradient_clip_val=CLIP)
    batches = ragged()
    trainer.fit(module, DataLoader(batches, batch_size=None), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return None if is_partial(module) else weights_of(module), seen


def ragged_by_hand(ranks: int) -> tuple[Tensor, dict[str, float]]:
    module, batches = Weighted(blocks=4), ragged()
    optimizer = module.configure_optimizers()
    for _ in range(2):
        shares = [batches[rank::ranks] for rank in range(ranks)]
        for first in range(0, max(map(len, shares)), 5):
            window = [
                (number, batch) for share in shares for number, batch in list(enumerate(share))[first : first + 5]
            ]
            total = sum(module.batch_weight(batch) for _, batch in window)
            optimizer.zero_grad()
            for number, batch in window:
                if number != 2:
                    (module.loss(batch) * (module.batch_weight(batch) / total)).backward()
            nn.utils.clip_grad_norm_(module.parameters(), CLIP)
            optimizer.step()
    with torch.no_grad():
        rows = sum(len(batch) for batch in batches)
        mean = sum(module.loss(batch).item() * len(batch) for batch in batches) / rows
    return weights_of(module), {"val": mean, "rows": float(rows)}


@pytest.mark.parametrize(
    ("ranks", "parallel"), [(2, "pp=2"), (4, "pp=2,dp_replicate=2"), (4, "pp=2,dp_shard=2"), (4, "pp=2,tp=2")]
)
def test_uneven_windows_and_evaluation_are_exact(ranks: int, parallel: str) -> None:
    # Windows with micro-batches of several shapes, one without a loss, and on two pipelines one without data.
    results = run_on_ranks(ranks, trained_ragged, parallel, ranks)
    weights, metrics = ragged_by_hand(resolve_degrees(parallel).lay_out(ranks).data_size)
    assert results[0][0] is not None
    torch.testing.assert_close(results[0][0], weights, rtol=1e-5, atol=1e-6)
    for _, seen in results:
        assert {name: seen[name] for name in metrics} == pytest.approx(metrics, rel=1e-5)


# ---- random numbers -------------------------------------------------------------------------------------------------


class Denoiser(LanguageModel):
    """Draws noise that is the input of the first stage and the target of the last one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(blocks=4)
        self.dropout = dropout
        for block in self.blocks:
            block.register_forward_hook(lambda _, args, output: nn.functional.dropout(output, dropout))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        clean = self.embed(batch[0]).detach()
        noise = torch.randn_like(clean)
        hidden = clean + noise * torch.rand(len(clean), 1, 1)
        for block in self.blocks:
            hidden = block(hidden)
        loss = nn.functional.mse_loss(self.norm(hidden), noise)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss


def denoised(ranks: int, schedule: str | None, dropout: float, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    module = Denoiser(dropout)
    settings: dict[str, Any] = {"max_steps": 6, "accumulate_grad_batches": 4}
    trainer = (
        silent_trainer(devices=1, **settings) if schedule is None else trainer_on(ranks, schedule, "pp=2", **settings)
    )
    trainer.fit(module, token_loader(24 * 4))
    return module.losses


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_draws_before_the_blocks_are_those_of_one_process(schedule: str) -> None:
    expected = run_on_ranks(1, denoised, 1, None, 0.0)[0]
    assert run_on_ranks(2, denoised, 2, schedule, 0.0)[0] == pytest.approx(expected, rel=1e-5)


def test_stages_and_micro_batches_draw_different_masks() -> None:
    first, again, other = (run_on_ranks(2, denoised, 2, "1f1b", 0.5, seed)[0] for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert run_on_ranks(2, masks)[1] == 8


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.seen: list[Tensor] = []

    def forward(self, hidden: Tensor) -> Tensor:
        mask = torch.rand(8)
        if torch.is_grad_enabled():
            self.seen.append(mask)
        return hidden * self.weight + mask


class OfMasks(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.masked = [Masked() for _ in range(4)]
        self.blocks = nn.Sequential(*self.masked)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.blocks(batch[0]).mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def masks() -> int:
    """Return the number of different masks on both ranks, of one step of two micro-batches."""
    module = OfMasks()
    trainer_on(2, "1f1b", "pp=2", max_steps=1, accumulate_grad_batches=2).fit(
        module, DataLoader(TensorDataset(torch.ones(8, 8)), batch_size=4)
    )
    mine = torch.stack([mask for block in module.masked for mask in block.seen])
    gathered = [torch.empty_like(mine) for _ in range(2)]
    torch.distributed.all_gather(gathered, mine)
    return len(torch.cat(gathered).unique(dim=0))
