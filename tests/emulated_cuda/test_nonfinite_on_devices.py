"""A loss that is not finite: found a few micro-batches later, with the step that it belongs to, or skipped.

The devices are emulated ones; ``make cuda`` runs these tests on those of the machine.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from emulated_fits import Classifier, batches, emulated_trainer, whole_weights
from ranks import run_on_ranks
from torch import Tensor

from phalanx.errors import NonFiniteError

AT = 7
# The docs' limit, in micro-batches.
LATEST = AT + 16


def planted(count: int) -> list[tuple[Tensor, Tensor]]:
    found = batches(count)
    found[AT] = (found[AT][0] * float("nan"), found[AT][1])
    return found


def raised(strategy: str) -> tuple[str, int]:
    module = Classifier()
    with pytest.raises(NonFiniteError) as failure:
        emulated_trainer(1, strategy=strategy, max_steps=40).fit(module, planted(41))
    return str(failure.value), len(module.kept)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_nan_is_reported_with_its_step(strategy: str) -> None:
    ((message, micro_batches),) = run_on_ranks(1, raised, strategy, device="cuda")
    assert f"optimizer step {AT} (epoch 0, batch {AT})" in message
    assert AT < micro_batches <= LATEST + 1


def skipped(strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights after a fit with a NaN, and after one that has the batches before and after it only."""
    found = []
    for is_planted in (True, False):
        data = planted(12)
        given = data if is_planted else data[:AT] + data[AT + 1 :]
        module = Classifier(optimizer="sgd")
        trainer = emulated_trainer(1, strategy=strategy, max_epochs=1, nonfinite="skip")
        trainer.fit(module, given)
        found.append(whole_weights(module))
    return found[0], found[1]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_skipped_update_leaves_the_weights(strategy: str) -> None:
    ((with_nan, without),) = run_on_ranks(1, skipped, strategy, device="cuda")
    for name, weight in without.items():
        torch.testing.assert_close(with_nan[name], weight, rtol=1e-6, atol=1e-7)


def overflowed() -> Any:
    """Fit in fp16 with a loss that overflows at first; return the losses and the number of steps."""
    module = Classifier()
    trainer = emulated_trainer(1, precision="16-mixed", max_steps=12)
    trainer.fit(module, batches(14))
    return module.losses(), trainer.global_step


def test_fp16_trains_through_the_overflows_of_its_first_steps() -> None:
    ((losses, steps),) = run_on_ranks(1, overflowed, device="cuda")
    assert steps == 12
    assert all(map(math.isfinite, losses))
