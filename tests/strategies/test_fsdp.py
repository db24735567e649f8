"""``fsdp`` trains what one process trains, and hands the model back as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks
from small_gpt import (
    GLOBAL_BATCH,
    STEPS,
    Block,
    Language,
    Parallel,
    SmallGPT,
    by_hand,
    per_update,
    token_loader,
    weights,
)
from torch import Tensor, nn

from phalanx import AccumulationSchedule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.strategies import FSDPStrategy


def trained(
    ranks: int, strategy: Any, windows: list[int], clip: float | None, steps: int = STEPS
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Train through the Trainer; return the losses of this rank's micro-batches, the weights, and what is odd."""
    module = Parallel()
    classes = [type(part) for part in module.modules()]
    schedule = AccumulationSchedule.cycle(windows) if len(windows) > 1 else windows[0]
    trainer = silent_trainer(
        strategy=strategy, devices=ranks, max_steps=steps, accumulate_grad_batches=schedule, gradient_clip_val=clip
    )
    data_ranks = trainer.fabric.world.data_size
    trainer.fit(module, token_loader(GLOBAL_BATCH // data_ranks))
    assert trainer.global_step == steps
    return module.losses, weights(module.gpt), leftovers(module, classes)


def leftovers(module: nn.Module, classes: list[type]) -> list[str]:
    """Return what a fit has left on a module that was not there before."""
    odd = [str(type(part)) for part, kind in zip(module.modules(), classes, strict=True) if type(part) is not kind]
    odd += [f"{type(p)} {p.device}" for p in module.parameters() if type(p.detach()) is not Tensor]
    for part in module.modules():
        odd += [name for name, table in vars(part).items() if name.endswith(("_hooks", "kwargs")) and table]
        odd += [name for name in vars(part) if "fsdp" in name or "composable" in name or name == "forward"]
    return odd


def check(results: list[Any], windows: list[int], clip: float | None, steps: int = STEPS) -> None:
    losses, expected = by_hand(windows, clip, steps)
    torch.testing.assert_close(per_update([each[0] for each in results], windows, steps), losses, rtol=1e-5, atol=0)
    for _, own, odd in results:
        assert not odd
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        (1, {}),
        (3, {}),
        (2, {"units": Block, "prefetch": 2}),
        (2, {"units": nn.Linear, "reshard_after_forward": False}),
        (2, {"units": (Block, nn.Embedding), "cpu_offload": True}),
        (2, {"units": 100, "activation_checkpointing": True}),
        (2, {"units": 10**6, "activation_checkpointing": (nn.LayerNorm, SmallGPT)}),
        (4, {"tensor_parallel": 2, "replicas": 2}),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_no_argument_changes_what_is_trained(ranks: int, arguments: dict[str, Any]) -> None:
    strategy = FSDPStrategy(gather_weights="all", **arguments)
    check(run_on_ranks(ranks, trained, ranks, strategy, [1, 2], 0.1, 6), [1, 2], 0.1, 6)


def test_arguments_of_other_frameworks_are_refused_with_their_equivalent() -> None:
    with refuses(ConfigurationError, "FSDPStrategy", "auto_wrap_policy="):
        FSDPStrategy(auto_wrap_policy={nn.Linear})
    with refuses(ConfigurationError, "unit=", "'units'"):
        FSDPStrategy(unit=nn.Linear)


def test_tensor_parallelism_without_a_plan_is_refused_before_any_process() -> None:
    with refuses(ConfigurationError, "Language.configure_tensor_parallel"):
        FSDPStrategy(tensor_parallel=2).check_module(Language())
    with refuses(ConfigurationError, "SmallGPT.configure_tensor_parallel"):
        FSDPStrategy(tensor_parallel=2).check_module(SmallGPT())
    FSDPStrategy(tensor_parallel=2).check_module(Parallel())
