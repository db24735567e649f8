"""Attributes, outputs and logged values of steps are equal on all ranks of a pipeline, or the step is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from language_model import Block, SGDModel, token_loader, tokens
from messages import says
from models import leave_after_refusal, plain_steps, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Callback
from phalanx.errors import ConfigurationError, LoopError
from phalanx.strategies import PipelineStrategy

ROWS, BATCH = 16, 4


class Model(SGDModel):
    """Notes values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []


class Keeps(Model):
    """Keeps losses of steps, whose mean lowers the rate at the end of an epoch; generates in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.made: dict[str, list[Tensor]] = {"tokens": []}
        self.total = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch[0])
        self.kept.append(loss.detach())
        self.total += loss.item()
        self.log("loss", loss)
        return {"loss": loss, "longest": loss.detach() * 2}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["longest"]))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        made = batch[0][:, :3]
        for _ in range(2):
            made = torch.cat([made, self(made)[:, -1:].argmax(-1)], 1)
        self.made["tokens"].append(made)
        return {"count": len(made)}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append(outputs["count"])

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(torch.cat(self.made["tokens"]).float().mean()))
        self.made["tokens"].clear()

    def on_train_epoch_end(self) -> None:
        mean = torch.stack(self.kept).mean().item()
        self.seen += [mean, self.total]
        self.kept.clear()
        if self.trainer is not None and mean < 100:
            self.optimizers().param_groups[0]["lr"] *= 0.5


class ReadsMetrics(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            module.seen.append(float(trainer.callback_metrics["loss"]))


def fitted(kind: type[Model], schedule: str, window: int, callbacks: list[Any]) -> tuple[list[float], Any]:
    module = kind()
    trainer = silent_trainer(
        strategy=PipelineStrategy(schedule),
        parallel="pp=2",
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=window,
        callbacks=callbacks,
        num_sanity_val_steps=0,
        verbose=False,
    )
    trainer.fit(module, token_loader(ROWS, BATCH), token_loader(8, BATCH) if kind is Keeps else None)
    return module.seen, None if trainer.global_rank else [each.detach() for each in module.parameters()]


def kept_by_hand() -> tuple[list[float], list[Tensor]]:
    """Train with plain torch, in windows of two batches."""
    module, seen = Keeps(), list[float]()
    optimizer = module.configure_optimizers()
    total = 0.0
    for _ in range(2):
        losses: list[float] = []
        for window in tokens(ROWS).split(2 * BATCH):
            optimizer.zero_grad()
            parts = [module.loss(part) for part in window.split(BATCH)]
            torch.stack(parts).mean().backward()
            optimizer.step()
            losses += [part.item() for part in parts]
            seen += [2 * losses[-2], 2 * losses[-1], losses[-1]]
        with torch.no_grad():
            made = tokens(8)[:, :3]
            for _ in range(2):
                made = torch.cat([made, module(made)[:, -1:].argmax(-1)], 1)
        total += sum(losses)
        seen += [BATCH, BATCH, made.float().mean().item(), sum(losses) / len(losses), total]
        optimizer.param_groups[0]["lr"] *= 0.5
    return seen, list(module.parameters())


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_what_steps_keep_and_return_is_on_all_ranks(schedule: str) -> None:
    seen, weights = kept_by_hand()
    (first, trained), (second, _) = run_on_ranks(2, fitted, Keeps, schedule, 2, [ReadsMetrics()])
    # The hook of the callback comes before that of the module.
    assert sorted(first) == pytest.approx(sorted(seen), rel=1e-4)
    assert first == second
    for found, wanted in zip(trained, weights, strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-4, atol=1e-5)


class Scaled(Model):
    """The loss of the batch before scales the embeddings."""

    scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.embed(batch[0]) * self.scale
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[0].flatten())
        self.scale = loss.item() / 4
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen.append(self.scale)


def test_what_a_step_kept_is_used_by_the_first_stage_in_the_next_window() -> None:
    module = Scaled()
    optimizer = module.configure_optimizers()
    for _ in range(2):
        plain_steps(optimizer, lambda batch: module.training_step([batch], 0), tokens(ROWS).split(BATCH))
        module.on_train_epoch_end()
    for seen, _ in run_on_ranks(2, fitted, Scaled, "1f1b", 1, []):
        assert seen == pytest.approx(module.seen, rel=1e-5)


class Balanced(Block):
    extra: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        self.extra = output.square().mean()
        return output


class AddsAttributes(Model):
    """Each block leaves a loss in an attribute; the step adds them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Balanced() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch[0]) + sum(block.extra for block in self.blocks)


class TakesMore(Model):
    """Takes another batch from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.more: Iterator[Tensor] = iter(tokens(64, seed=2).split(BATCH))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(torch.cat([batch[0], next(self.more)]))


class Counted(Model):
    """Counts before it calls the blocks."""

    count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.count += 1
        return self.loss(batch[0]) * min(1.0, self.count / 4)


class Compiled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].compile(backend="eager")


def refused(kind: type[Model], schedule: str, window: int) -> str:
    with pytest.raises((ConfigurationError, LoopError)) as caught:
        fitted(kind, schedule, window, [])
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "schedule", "window", "words"),
    [
        (TakesMore, "1f1b", 2, "self.more"),
        (Counted, "interleaved-1f1b", 2, "self.count"),
        (Compiled, "1f1b", 2, "blocks.1 is compiled"),
    ],
)
def test_steps_that_stages_would_run_otherwise_are_refused(
    kind: type[Model], schedule: str, window: int, words: str
) -> None:
    says(run_on_ranks(2, refused, kind, schedule, window), words)


@pytest.mark.parametrize(("kind", "words"), [(AddsAttributes, "strategy='ddp' or 'fsdp'"), (Scaled, "micro-batch 1")])
def test_values_of_other_stages_and_of_earlier_micro_batches_are_refused(kind: type[Model], words: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run_on_ranks(2, leaving, kind)
    assert "LoopError" in str(caught.value)
    assert words in str(caught.value)


def leaving(kind: type[Model]) -> None:
    leave_after_refusal(lambda: fitted(kind, "1f1b", 2, []))
