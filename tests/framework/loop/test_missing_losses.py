"""A training step whose loss trains nothing: refused under every strategy, with the line of the user's step."""

from __future__ import annotations

from typing import Any

import pytest
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from small_fits import capturing

from phalanx.framework.core.errors import LoopError


class Odd(Regressor):
    """Returns what ``kind`` names instead of the loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        loss = super().training_step(batch, batch_idx)
        if self.kind == "manual backward":
            self.manual_backward(loss)
        if self.kind == "second batch":
            return None if batch_idx == 0 else loss
        if self.kind == "second epoch":
            return loss if self.current_epoch == 0 else None
        if self.kind == "weights of zero":
            return loss
        return {"detached": loss.detach(), "none": None, "detached in a dict": {"loss": loss.detach()}}.get(self.kind)

    def batch_weight(self, batch: Any) -> float:
        return 0.0 if self.kind == "weights of zero" else 1.0


def outcome(strategy: str, devices: int, kind: str, **settings: Any) -> tuple[str, int, list[str]]:
    """Return the error of a fit, the number of optimizer steps that it counted, and the notes."""
    trainer = silent_trainer(**{"strategy": strategy, "devices": devices, "max_epochs": 1, **settings})
    notes = capturing(trainer)
    try:
        trainer.fit(Odd(kind), loader(30))
        text = ""
    except LoopError as error:
        text = str(error)
    return text, trainer.global_step, [note for note in notes if "returned None" in note]


def all_on_ranks(strategy: str) -> dict[str, tuple[str, int, list[str]]]:
    return {kind: outcome(strategy, 2, kind) for kind in ("detached", "none", "manual backward", "second batch")}


def assert_refused(found: dict[str, tuple[str, int, list[str]]]) -> None:
    text, steps, _ = found["detached"]
    assert "a loss that does not depend on any parameter" in text
    assert "test_missing_losses.py, line " in text
    assert steps == 0
    text, steps, notes = found["none"]
    # Under zero2 each backward pass is a collective, so the first step is refused.
    assert "returned None " in text
    assert " for every batch" in text
    assert (steps, len(notes)) == (0, 0 if "could replace" in text else 1)
    text, _, _ = found["manual backward"]
    assert "automatic_optimization = False" in text
    assert found["second batch"][0] == ""
    assert found["second batch"][1] > 0


@pytest.mark.parametrize("strategy", ["ddp_find_unused_parameters_true", "fsdp", "zero2"])
def test_a_step_without_a_loss_is_refused_on_all_ranks(strategy: str) -> None:
    for found in run_on_ranks(2, all_on_ranks, strategy):
        assert_refused(found)


def test_a_step_without_a_loss_is_refused_on_one_rank() -> None:
    kinds = ("detached", "none", "manual backward", "second batch", "detached in a dict", "second epoch")
    found = {kind: outcome("single", 1, kind, max_epochs=2) for kind in kinds}
    assert_refused(found)
    assert "does not depend on any parameter" in found["detached in a dict"][0]
    # A run that has trained may leave out an epoch.
    assert found["second epoch"][:2] == ("", 8)


def uneven(kind: str) -> tuple[str, int, list[str]]:
    """Train where only rank 0 has data in the last window of an epoch."""
    return outcome("ddp", 2, kind, accumulate_grad_batches=3)


def test_ranks_agree_that_there_was_no_loss() -> None:
    for text, steps, notes in run_on_ranks(2, uneven, "none"):
        assert ("returned None for every batch" in text, steps, len(notes)) == (True, 0, 1)
    assert all(text == "" for text, _, _ in run_on_ranks(2, uneven, "weights of zero"))


class Skipping(Odd):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


def test_an_epoch_that_a_hook_skips_needs_no_loss() -> None:
    trainer = silent_trainer(devices=1, max_epochs=2)
    notes = capturing(trainer)
    trainer.fit(Skipping("none"), loader(32))
    assert not any("returned None" in note for note in notes)
