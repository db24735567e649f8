"""Pipelines train what one process of plain torch trains: every schedule, replicas, uneven windows, evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from language_model import LanguageModel, token_loader, tokens
from models import plain_steps, silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import AccumulationSchedule, TrainModule
from phalanx.framework.core.degrees import resolve_degrees
from phalanx.strategies import PipelineStrategy

GLOBAL_BATCH, CLIP = 8, 0.5
# The micro-batches of each window: as many as a schedule wants, one alone, and fewer than a pipeline of four stages.
WINDOWS = (4, 1, 2)
STEPS = 2 * len(WINDOWS)
ROWS = GLOBAL_BATCH * STEPS
# Schedule, blocks of the model (five are not divided evenly), ranks, and how they are used.
LAYOUTS = [
    ("gpipe", 4, 2, "pp=2"),
    ("1f1b", 5, 2, "pp=2"),
    ("interleaved-1f1b", 4, 2, "pp=2"),
    ("zero-bubble", 4, 2, "pp=2"),
    ("zero-bubble-v", 5, 2, "pp=2"),
    ("1f1b", 4, 4, "pp=4"),
    ("zero-bubble", 4, 4, "pp=4"),
    ("gpipe", 4, 4, "pp=2,dp_replicate=2"),
    ("1f1b", 5, 4, "pp=2,dp_shard=2"),
    ("interleaved-1f1b", 4, 4, "pp=2,dp_shard=2"),
    ("zero-bubble-v", 5, 4, "pp=2,dp_shard=2"),
    ("zero-bubble-v", 4, 4, "pp=2,tp=2"),
    ("1f1b", 2, 8, "pp=2,tp=2,dp_shard=2"),
]


class Model(LanguageModel):
    """Is updated by SGD: the size of its gradients matters, and DTensor has few operators to prepare."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)


def trainer_on(ranks: int, schedule: str, parallel: str, **settings: Any) -> Any:
    strategy = PipelineStrategy(schedule)
    return silent_trainer(devices=ranks, strategy=strategy, parallel=parallel, **settings)


def micro_batches(shards: int) -> list[list[Tensor]]:
    """Return the batches of all ranks: each global batch in as many parts as its window has micro-batches."""
    parts = []
    for step, batch in enumerate(tokens(ROWS).split(GLOBAL_BATCH)):
        parts += [[part] for part in batch.split(GLOBAL_BATCH // shards // WINDOWS[step % len(WINDOWS)])]
    return parts


def trained(schedule: str, blocks: int, ranks: int, parallel: str) -> tuple[list[float], float | None]:
    module = Model(blocks=blocks)
    accumulation = AccumulationSchedule.cycle(WINDOWS)
    settings = {"max_steps": STEPS, "accumulate_grad_batches": accumulation, "gradient_clip_val": CLIP}
    trainer = trainer_on(ranks, schedule, parallel, **settings)
    batches = micro_batches(trainer.fabric.resources.data_size)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    losses = list(module.losses)
    return losses, None if is_partial(module) else module.loss(tokens(64, seed=5)).item()


def is_partial(module: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in module.parameters())


def by_hand(blocks: int) -> tuple[list[float], float]:
    module = Model(blocks=blocks)
    losses = plain_steps(module.configure_optimizers(), module.loss, tokens(ROWS).split(GLOBAL_BATCH), CLIP)
    return losses, module.loss(tokens(64, seed=5)).item()


@pytest.mark.parametrize(("schedule", "blocks", "ranks", "parallel"), LAYOUTS)
def test_a_pipeline_trains_as_one_process(schedule: str, blocks: int, ranks: int, parallel: str) -> None:
    results = run_on_ranks(ranks, trained, schedule, blocks, ranks, parallel, timeout=120.0)
    layout = resolve_degrees(parallel).lay_out(ranks)
    # The first rank of each pipeline computes the losses, and rank 0 has all weights in the end.
    seen = torch.stack([torch.tensor(losses) for losses, _ in results[:: layout.copies]]).mean(0)
    windows = seen.split([WINDOWS[step % len(WINDOWS)] for step in range(STEPS)])
    losses, final = by_hand(blocks)
    torch.testing.assert_close(torch.stack([part.mean() for part in windows]), torch.tensor(losses), rtol=1e-5, atol=0)
    assert results[0][1] == pytest.approx(final, rel=1e-5)
    # The list that the step appends to is that of the last stage on all ranks of a pipeline.
    firsts = [results[rank - rank % layout.copies] for rank in range(ranks)]
    assert [losses for losses, _ in results] == [losses for losses, _ in firsts]


# ---- windows of uneven weights and shapes ---------------------------------------------------------------------------


class Weighted(Model):
    """Weighs batches by their tokens, and notes what it is given."""

    def batch_weight(self, batch: Any) -> float:
        return float(batch.numel() - len(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step([batch], batch_idx) if batch_idx != 2 else None

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch), batch_size=len(batch))
        self.log("rows", float(len(batch)), reduce_fx="sum")


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
    module = Weighted(blocks=2)
    settings = {"accumulate_grad_batches": 5, "gradient_clip_val": CLIP, "num_sanity_val_steps": 0}
    trainer = trainer_on(ranks, "1f1b", parallel, max_epochs=1, **settings)
    batches = ragged()
    trainer.fit(module, DataLoader(batches, batch_size=None), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return None if is_partial(module) else weights_of(module), seen


def ragged_by_hand(ranks: int) -> tuple[Tensor, dict[str, float]]:
    module, batches = Weighted(blocks=2), ragged()
    optimizer = module.configure_optimizers()
    shares = [batches[rank::ranks] for rank in range(ranks)]
    for first in range(0, max(map(len, shares)), 5):
        window = [(number, batch) for share in shares for number, batch in list(enumerate(share))[first : first + 5]]
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
    settings: dict[str, Any] = {"max_steps": 3, "accumulate_grad_batches": 4}
    trainer = (
        silent_trainer(devices=1, **settings) if schedule is None else trainer_on(ranks, schedule, "pp=2", **settings)
    )
    trainer.fit(module, token_loader(12 * 4))
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
