"""Averages of weights: those of hand-written torch under every strategy, evaluated with, and never called the model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from language_model import LanguageModel, adamw, token_loader, tokens
from models import silent_trainer
from parity_table import strategy_named
from ranks import run_on_ranks
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from phalanx import Trainer
from phalanx.callbacks import Callback, EMAWeightAveraging
from phalanx.checkpoint import open_checkpoint
from phalanx.framework.parallel.full_tensors import whole_tensors

STEPS, VALIDATED, GLOBAL_BATCH, DECAY = 8, 4, 8, 0.8
ROWS = GLOBAL_BATCH * STEPS
CELLS = {
    "single": ("single", 1, "32-true"),
    "ddp": ("ddp", 2, "32-true"),
    "fsdp": ("fsdp", 2, "32-true"),
    "zero2": ("zero2", 2, "32-true"),
    "zero3": ("zero3", 2, "32-true"),
    "zero3-nvme": ("zero3-nvme", 2, "32-true"),
    "zero1 bf16": ("zero1", 2, "bf16-mixed"),
    "zero3 bf16": ("zero3", 2, "bf16-mixed"),
}


class Validated(LanguageModel):
    """The transformer, which notes its validation losses too."""

    def __init__(self) -> None:
        super().__init__()
        self.validated: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch[0])
        self.log("val_loss", loss, batch_size=len(batch[0]))


class Saver(Callback):
    """Saves wherever ``where`` says, once the run has come to ``step``."""

    def __init__(self, saves: dict[str, str], step: int) -> None:
        self.saves, self.step = dict(saves), step

    def save(self, trainer: Trainer, hook: str) -> None:
        if trainer.global_step == self.step and hook in self.saves:
            trainer.save_checkpoint(self.saves.pop(hook))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.save(trainer, "on_train_batch_end")

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.save(trainer, "on_validation_batch_end")

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.save(trainer, "on_validation_end")

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        self.save(trainer, "on_train_end")


class Watcher(Callback):
    """Notes the validation losses, and the averages at the end; averages the whole live weights by hand."""

    def __init__(self, ema: EMAWeightAveraging | None) -> None:
        self.ema = ema
        self.validated: list[float] = []
        self.averages: dict[str, Tensor] = {}
        self.by_hand: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        state = trainer.strategy.state.model_state(module)
        live = {n: t.float().clone() for n, t in whole_tensors(state, trainer.world)}
        for name, tensor in live.items():
            own = self.by_hand.setdefault(name, tensor)
            own += (1 - DECAY) * (tensor - own)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.validated.append(trainer.callback_metrics["val_loss"].item())

    def on_fit_end(self, *_: Any) -> None:
        if self.ema is not None:
            self.averages = {name: tensor.clone() for name, tensor in self.ema.averaged_state_dict().items()}


@dataclass
class Seen:
    """What a rank has seen of a run: losses, averages, and the module's weights after it where it has them."""

    losses: list[float]
    validated: list[float]
    averages: dict[str, Tensor]
    by_hand: dict[str, Tensor]
    whole: dict[str, Tensor] | None


def trained(
    cell: str,
    folder: str,
    averages: bool = True,
    saves: tuple[int, dict[str, str]] = (0, {}),
    resume: str | None = None,
) -> Seen:
    """Train, and save where it is asked for. Runs on each rank."""
    strategy, ranks, precision = CELLS[cell]
    ema = EMAWeightAveraging(decay=DECAY) if averages else None
    watcher = Watcher(ema)
    module = Validated()
    trainer = silent_trainer(
        strategy=strategy_named(strategy, folder),
        devices=ranks,
        precision=precision,
        max_steps=STEPS,
        val_check_interval=VALIDATED,
        num_sanity_val_steps=0,
        callbacks=[*([] if ema is None else [ema]), watcher, Saver(saves[1], saves[0])],
        default_root_dir=folder,
    )
    batch = GLOBAL_BATCH // ranks
    trainer.fit(module, token_loader(ROWS, batch), token_loader(24, batch), ckpt_path=resume)
    state = module.state_dict()
    whole = None if any(tensor.is_meta for tensor in state.values()) else {n: t.clone() for n, t in state.items()}
    return Seen(module.losses, watcher.validated, watcher.averages, watcher.by_hand, whole)


def on_ranks(cell: str, folder: Path, *args: Any) -> list[Seen]:
    """Train on as many ranks as a cell has."""
    ranks = CELLS[cell][1]
    return [trained(cell, str(folder), *args)] if ranks == 1 else run_on_ranks(ranks, trained, cell, str(folder), *args)


@cache
def by_hand(precision: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train one process of plain torch; return losses, validation losses of torch's EMA, and the EMA's weights."""
    module, rows = LanguageModel(), tokens(ROWS)
    average: Any = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = adamw(module, module.lr)
    context = torch.autocast("cpu", torch.bfloat16) if precision == "bf16-mixed" else nullcontext()
    losses, validated = [], []
    for step in range(STEPS):
        with context:
            loss = module.loss(rows[step * GLOBAL_BATCH :][:GLOBAL_BATCH])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(module)
        losses.append(loss.item())
        if (step + 1) % VALIDATED == 0:
            with torch.no_grad(), context:
                validated.append(average.module.loss(tokens(24)).item())
    return losses, validated, {name: tensor.clone() for name, tensor in average.module.state_dict().items()}


def checked(found: list[Seen], precision: str) -> None:
    """Compare what ranks have seen with plain torch."""
    tolerance = 1e-5 if precision == "32-true" else 2e-2
    losses, validated, expected = by_hand(precision)
    own_losses = torch.tensor([seen.losses for seen in found]).mean(0)
    torch.testing.assert_close(own_losses, torch.tensor(losses), rtol=tolerance, atol=0)
    for seen in found:
        torch.testing.assert_close(torch.tensor(seen.validated), torch.tensor(validated), rtol=tolerance, atol=0)
    first = found[0]
    assert first.averages.keys() == expected.keys()
    assert first.whole is not None
    for name, tensor in expected.items():
        own = first.averages[name]
        torch.testing.assert_close(own, first.by_hand[name], rtol=1e-6, atol=1e-7)
        # The softmax takes no notice of keys' biases: their gradients are rounding, which Adam makes steps of.
        if precision == "32-true" and not name.endswith("key.bias"):
            torch.testing.assert_close(own, tensor, rtol=1e-4, atol=1e-4)
        assert own.dtype == torch.float32
        assert torch.equal(own.to(first.whole[name].dtype), first.whole[name])


# Runs that resume under ``ddp`` and ``zero2`` are below.
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in ("ddp", "zero2")])
def test_under_every_strategy(cell: str, tmp_path: Path) -> None:
    hooks = ["on_train_batch_end", "on_validation_batch_end", "on_validation_end"]
    paths = {hook: str(tmp_path / f"{hook}.ckpt") for hook in hooks}
    found = on_ranks(cell, tmp_path, True, (VALIDATED, paths))
    checked(found, CELLS[cell][2])
    plain = on_ranks(cell, tmp_path, False, (VALIDATED, {"on_validation_end": str(tmp_path / "plain.ckpt")}))
    assert [seen.losses for seen in plain] == [seen.losses for seen in found]

    # Whenever it is saved, the model is the live one and the average the average.
    live = open_checkpoint(tmp_path / "plain.ckpt")
    assert "averages" not in live.sections
    wanted = live.read_section("model")
    first = open_checkpoint(paths[hooks[0]]).read_section("averages")
    assert {name.removeprefix("ema/") for name in first} == wanted.keys()
    for path in paths.values():
        checkpoint = open_checkpoint(path)
        assert_equal(checkpoint.read_section("model"), wanted)
        assert_equal(checkpoint.read_section("averages"), first)
        state = {"count": VALIDATED, "last_epoch": -1, "evaluates": True}
        assert checkpoint.document["averages"] == {"ema": state}

    # Resumed on the same layout it is equal to the bit, also from amid a validation.
    resumed = on_ranks(cell, tmp_path, True, (0, {}), paths["on_validation_batch_end"])
    for seen, before in zip(resumed, found, strict=True):
        assert seen.losses == before.losses[VALIDATED:]
        # The validation that it was saved in is made again, with the average as it was.
        assert seen.validated == before.validated
        assert_equal(seen.averages, before.averages)


def test_an_average_resumes_under_other_strategies(tmp_path: Path) -> None:
    path = tmp_path / "0.ckpt"
    found = on_ranks("zero3", tmp_path, True, (VALIDATED, {"on_train_batch_end": str(path)}))
    for cell in ("fsdp", "zero2", "single", "ddp"):
        resumed = on_ranks(
            cell, tmp_path, True, (VALIDATED, {"on_train_batch_end": str(tmp_path / f"{cell}.ckpt")}), str(path)
        )
        torch.testing.assert_close(
            torch.tensor(resumed[0].validated[-1:]), torch.tensor(found[0].validated[-1:]), rtol=1e-5, atol=0
        )
        for name, tensor in found[0].averages.items():
            if not name.endswith("key.bias"):
                torch.testing.assert_close(resumed[0].averages[name], tensor, rtol=0, atol=1e-5)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    """Compare tensors bit by bit."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
