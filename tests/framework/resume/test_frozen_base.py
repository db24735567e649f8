"""Checkpoints without the base: what they hold, that they resume to the bit, and that another base is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import Adapted, frozen_of, row_loader
from models import silent_trainer
from ranks import run_on_ranks

import phalanx
from phalanx import Callback

STEPS, SAVED = 4, 2
STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 2, "zero1": 2, "zero2": 2, "zero3": 2}


class Lean(Adapted):
    """Leaves frozen weights out of its checkpoints; with ``shift`` it is built with another base."""

    save_frozen = False

    def __init__(self, variant: str = "dropout", late: bool = False, shift: float = 0.0) -> None:
        self.shift = shift
        super().__init__(variant, late)

    def build(self) -> None:
        super().build()
        if self.shift:
            with torch.no_grad():
                next(one for name, one in self.net.named_parameters() if "down_proj" in name)[0, 0] += self.shift


class SaveAt(Callback):
    """Saves a checkpoint after an optimizer step."""

    def __init__(self, path: Path, step: int = SAVED) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class SaveAtStart(Callback):
    """Saves a checkpoint before the first optimizer step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.save_checkpoint(self.path)


def fit(
    strategy: str,
    ranks: int,
    module: Adapted,
    callbacks: list[Callback],
    resume: Path | None = None,
    steps: int = STEPS,
    **settings: Any,
) -> Any:
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_steps=steps, callbacks=callbacks, **settings)
    trainer.fit(module, row_loader(STEPS * 12, 12 // ranks), ckpt_path=resume)
    return trainer


def losses_and_weights(module: Adapted) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of this rank, and the weights of a rank that has them."""
    weights = {} if any(one.is_meta for one in module.parameters()) else module.state_dict()
    return module.losses, {name: one.clone() for name, one in weights.items()}


def undisturbed(strategy: str, ranks: int, path: Path, variant: str) -> Any:
    module = Lean(variant)
    fit(strategy, ranks, module, [SaveAt(path)])
    return losses_and_weights(module)


def resumed(strategy: str, ranks: int, path: Path, variant: str, late: bool = False) -> Any:
    # The generator is elsewhere than in the fit that saved.
    torch.manual_seed(99)
    module = Lean(variant, late)
    fit(strategy, ranks, module, [], path)
    return losses_and_weights(module)


def on_ranks(ranks: int, function: Any, *args: Any) -> list[Any]:
    return [function(*args)] if ranks == 1 else run_on_ranks(ranks, function, *args, timeout=120.0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_fit_resumes_to_the_bit_from_trained_weights_alone(strategy: str, tmp_path: Path) -> None:
    ranks, path = STRATEGIES[strategy], tmp_path / "lean.ckpt"
    whole = on_ranks(ranks, undisturbed, strategy, ranks, path, "dropout")
    manifest = phalanx.checkpoint.inspect(path).sections["model"]
    frozen = frozen_of(Lean("dropout"))
    assert (manifest.left_out, manifest.left_out_elements) == (len(frozen), sum(one.numel() for one in frozen.values()))
    assert phalanx.checkpoint.verify(path) == []
    late = strategy in ("fsdp", "zero3")
    for (losses, weights), (found, after) in zip(
        whole, on_ranks(ranks, resumed, strategy, ranks, path, "dropout", late), strict=True
    ):
        assert found == losses[SAVED:]
        assert weights.keys() == after.keys()
        assert all(torch.equal(weights[name], after[name]) for name in weights)


def test_it_moves_between_strategies_and_zero3(tmp_path: Path) -> None:
    chain = [("fsdp", 2), ("zero3", 3), ("single", 1), ("zero2", 2), ("ddp", 3), ("fsdp", 3)]
    path = tmp_path / "first.ckpt"
    whole = on_ranks(1, undisturbed, "single", 1, path, "conv1d")
    expected = torch.tensor(whole[0][0][SAVED:])
    for strategy, ranks in chain:
        copies = on_ranks(ranks, resaved, strategy, ranks, path, tmp_path / f"{strategy}-{ranks}.ckpt")
        path = tmp_path / f"{strategy}-{ranks}.ckpt"
        torch.testing.assert_close(torch.tensor(copies).mean(0), expected, rtol=1e-5, atol=0.0)
    left_out = [phalanx.checkpoint.open_checkpoint(each).left_out for each in (tmp_path / "first.ckpt", path)]
    assert left_out[0] == left_out[1]


def resaved(strategy: str, ranks: int, path: Path, to: Path) -> list[float]:
    """Resume, and save the restored state before the first step."""
    module = Lean("conv1d")
    fit(strategy, ranks, module, [SaveAtStart(to)], path)
    return module.losses
