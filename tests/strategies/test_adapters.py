"""Models with the adapters of peft train under every strategy as in plain torch, and frozen weights cost nothing."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from adapted_models import VARIANTS, Adapted, by_hand, frozen_of, row_loader, rows
from models import silent_trainer
from ranks import over_gloo, run_on_ranks
from torch.profiler import ProfilerActivity, profile

STEPS, GLOBAL_BATCH = 4, 12
SHARDED = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
# Every strategy, and every feature of peft under two that gather layers, each in its own way.
CASES = [("conv1d", strategy, 2, True, 2) for strategy in SHARDED]
CASES += [("linear", strategy, 3, False, 1) for strategy in ("fsdp", "zero3")]
CASES += [
    (variant, strategy, 2, strategy == "zero3", 1)
    for variant in VARIANTS.keys() - {"conv1d", "linear", "dropout"}
    for strategy in ("fsdp", "zero3")
]
_WIDTHS = {"float": 4, "double": 8, "long int": 8, "unsigned char": 1, "int": 4, "bool": 1}


def fitted(variant: str, strategy: str, ranks: int, late: bool, window: int) -> tuple[list[float], bool]:
    """Train; return the losses of this rank's micro-batches, and whether frozen weights kept their values."""
    module = Adapted(variant, late)
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_steps=STEPS, accumulate_grad_batches=window)
    trainer.fit(module, row_loader(STEPS * GLOBAL_BATCH, GLOBAL_BATCH // ranks // window))
    if not trainer.is_global_zero:
        return module.losses, True
    wanted, found = frozen_of(Adapted(variant)), frozen_of(module)
    return module.losses, wanted.keys() == found.keys() and all(
        torch.equal(wanted[name], found[name]) for name in found
    )


def losses_of(results: list[Any], window: int) -> torch.Tensor:
    """Return the loss of each step, the mean over ranks and micro-batches."""
    return torch.tensor([losses for losses, _ in results], dtype=torch.float64).mean(0).view(STEPS, window).mean(1)


@pytest.mark.parametrize(("variant", "strategy", "ranks", "late", "window"), sorted(CASES))
def test_adapters_train_as_in_plain_torch(variant: str, strategy: str, ranks: int, late: bool, window: int) -> None:
    expected = by_hand(Adapted(variant), rows(STEPS * GLOBAL_BATCH), GLOBAL_BATCH, STEPS)
    results = run_on_ranks(ranks, fitted, variant, strategy, ranks, late, window, timeout=120.0)
    torch.testing.assert_close(losses_of(results, window).tolist(), expected, rtol=1e-6, atol=0.0)
    assert all(kept for _, kept in results)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_on_one_rank_the_losses_are_equal(variant: str) -> None:
    torch.manual_seed(1)
    expected = by_hand(Adapted(variant), rows(STEPS * GLOBAL_BATCH), GLOBAL_BATCH, STEPS)
    torch.manual_seed(1)
    found, kept = fitted(variant, "single", 1, True, 1)
    assert found == expected
    assert kept


def test_dropout_of_adapters_draws_the_same_numbers_under_every_strategy() -> None:
    expected = losses_of(run_on_ranks(2, fitted, "dropout", "ddp", 2, False, 1), 1)
    for strategy in ("fsdp", "zero2", "zero3"):
        found = losses_of(run_on_ranks(2, fitted, "dropout", strategy, 2, False, 1, timeout=120.0), 1)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)


# ---- frozen weights --------------------------------------------------------------------------------------------------


class Watched(Adapted):
    """Counts the gradients of frozen parameters before each update."""

    def __init__(self) -> None:
        super().__init__("linear")
        self.frozen_gradients = self.elements_held = 0

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.frozen_gradients += sum(one.grad is not None for one in self.parameters() if not one.requires_grad)
        held = [one for group in optimizer.param_groups for one in group["params"]]
        # Stage 3 of ZeRO shows no elements outside of the layers in progress.
        self.elements_held = sum(getattr(one, "ds_numel", one.numel()) for one in held)


def sent(strategy: str, steps: int) -> tuple[Counter[str], int, int]:
    """Train; return the bytes of each collective, the gradients of frozen parameters, and the elements with state."""
    module = Watched()
    trainer = silent_trainer(strategy=strategy, devices=2, max_steps=steps)
    with over_gloo(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        trainer.fit(module, row_loader(8 * steps, 4))
    found: Counter[str] = Counter()
    for event in seen.profiler.kineto_results.events():
        kind, _, collective = event.name().partition(":")
        if kind == "gloo":
            shapes = zip(event.shapes(), event.dtypes(), strict=True)
            found[collective] += sum(math.prod(shape) * _WIDTHS[dtype] for shape, dtype in shapes)
    return found, module.frozen_gradients, module.elements_held


def trained_bytes() -> int:
    """Return the size of the trained parameters, which is a twentieth of the model's."""
    parameters = list(Adapted("linear").parameters())
    trained = sum(one.numel() for one in parameters if one.requires_grad)
    assert 10 * trained < sum(one.numel() for one in parameters)
    return 4 * trained


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "zero2", "zero3"])
def test_gradients_of_frozen_weights_are_neither_kept_nor_sent(strategy: str) -> None:
    long, short = (run_on_ranks(2, sent, strategy, steps, timeout=120.0)[0] for steps in (6, 3))
    reductions = [name for name in long[0] if "reduce" in name]
    per_step = sum(long[0][name] - short[0][name] for name in reductions) / 3
    # Beside the gradients, flags and norms are reduced, and pieces may be padded.
    assert trained_bytes() <= per_step <= 1.5 * trained_bytes()
    _, frozen_gradients, held = long
    assert frozen_gradients == 0
    assert 0 < held <= trained_bytes() / 4
