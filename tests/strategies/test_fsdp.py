"""``fsdp`` trains what one process trains, and hands the model back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import silent_trainer
from ranks import run_on_ranks
from small_gpt import GLOBAL_BATCH, STEPS, Block, Language, SmallGPT, by_hand, per_update, token_loader, weights
from torch import Tensor, nn

from phalanx import AccumulationSchedule
from phalanx.strategies import FSDPStrategy

SCHEDULE = [1, 2, 3, 1, 4, 2]


def trained(
    ranks: int, strategy: Any, windows: list[int], clip: float | None
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Train through the Trainer; return the losses of this rank's micro-batches, the weights, and what is odd."""
    module = Language()
    classes = [type(part) for part in module.modules()]
    schedule = AccumulationSchedule.cycle(windows) if len(windows) > 1 else windows[0]
    trainer = silent_trainer(
        strategy=strategy, devices=ranks, max_steps=STEPS, accumulate_grad_batches=schedule, gradient_clip_val=clip
    )
    data_ranks = trainer.fabric.world.data_size
    trainer.fit(module, token_loader(GLOBAL_BATCH // data_ranks))
    assert trainer.global_step == STEPS
    return module.losses, weights(module.gpt), leftovers(module, classes)


def leftovers(module: nn.Module, classes: list[type]) -> list[str]:
    """Return what a fit has left on a module that was not there before."""
    odd = [str(type(part)) for part, kind in zip(module.modules(), classes, strict=True) if type(part) is not kind]
    odd += [f"{type(p)} {p.device}" for p in module.parameters() if type(p.detach()) is not Tensor]
    for part in module.modules():
        odd += [name for name, table in vars(part).items() if name.endswith(("_hooks", "kwargs")) and table]
        odd += [name for name in vars(part) if "fsdp" in name or "composable" in name or name == "forward"]
    return odd


def check(results: list[Any], windows: list[int], clip: float | None) -> None:
    losses, expected = by_hand(windows, clip)
    torch.testing.assert_close(per_update([each[0] for each in results], windows), losses, rtol=1e-5, atol=0)
    for _, own, odd in results:
        assert not odd
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("windows", [[1], [4], SCHEDULE], ids=["1", "4", "schedule"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_losses_and_weights_equal_plain_torch(ranks: int, windows: list[int], clip: float | None) -> None:
    strategy = FSDPStrategy(gather_weights="all")
    check(run_on_ranks(ranks, trained, ranks, strategy, windows, clip), windows, clip)


@pytest.mark.parametrize(
    "arguments",
    [
        {"units": Block},
        {"units": nn.Linear},
        {"units": (Block, nn.Embedding)},
        {"units": 100},
        {"units": 10**6},
        {"reshard_after_forward": False},
        {"cpu_offload": True},
        {"activation_checkpointing": True},
        {"activation_checkpointing": (nn.LayerNorm, SmallGPT)},
        {"prefetch": 2},
        {"replicas": 2},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_no_argument_changes_what_is_trained(arguments: dict[str, Any]) -> None:
    strategy = FSDPStrategy(gather_weights="all", **arguments)
    check(run_on_ranks(2, trained, 2, strategy, [1, 2, 3], 0.1), [1, 2, 3], 0.1)
