"""Tensor parallelism beside ``fsdp``: the same model, the same state, whatever is split."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks
from small_gpt import (
    GLOBAL_BATCH,
    Language,
    by_hand,
    loss_of,
    per_update,
    small_gpt,
    token_data,
    token_loader,
    weights,
)
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from phalanx.framework.core.errors import ConfigurationError
from phalanx.strategies import FSDPStrategy


class Parallel(Language):
    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        """Split the feed-forward layers, and the tied embedding over its odd number of tokens."""
        return {
            "gpt.blocks.*.up": ColwiseParallel(),
            "gpt.blocks.*.down": RowwiseParallel(),
            "gpt.embedding": RowwiseParallel(input_layouts=Replicate()),
            "gpt.head": ColwiseParallel(output_layouts=Replicate()),
        }


def trained(strategy: Any, ranks: int, steps: int) -> tuple[list[float], dict[str, Tensor], list[str], tuple[int, int]]:
    module = Parallel()
    trainer = silent_trainer(
        strategy=strategy, devices=ranks, max_steps=steps, accumulate_grad_batches=2, gradient_clip_val=0.1
    )
    world = trainer.fabric.world
    trainer.fit(module, token_loader(GLOBAL_BATCH // world.data_size))
    tied = "" if module.gpt.head.weight is module.gpt.embedding.weight else "untied"
    hooks = [name for part in module.modules() for name, table in vars(part).items() if "_hooks" in name and table]
    return module.losses, weights(module.gpt), [*hooks, *[tied] * bool(tied)], (world.data_rank, world.data_size)


@pytest.mark.parametrize(("ranks", "arguments"), [(2, {}), (4, {"replicas": 2})])
def test_losses_and_weights_equal_plain_torch(ranks: int, arguments: dict[str, Any]) -> None:
    steps = 3
    strategy = FSDPStrategy(tensor_parallel=2, gather_weights="all", **arguments)
    results = run_on_ranks(ranks, trained, strategy, ranks, steps)
    losses, expected = by_hand([2], 0.1, steps)
    torch.testing.assert_close(per_update([each[0] for each in results], [2], steps), losses, rtol=1e-5, atol=0)
    for rank, (_, own, odd, data) in enumerate(results):
        assert not odd
        assert data == (rank // 2, ranks // 2)
        torch.testing.assert_close(own, expected, rtol=1e-4, atol=2e-5)


def fitted_again() -> tuple[float, list[float], list[float]]:
    """Fit, evaluate and fit a module again; return a loss of evaluation and the losses of both fits."""
    module = Parallel()
    trainer = silent_trainer(strategy=FSDPStrategy(tensor_parallel=2), devices=2, max_steps=2)
    trainer.fit(module, token_loader(GLOBAL_BATCH))
    first, module.losses = module.losses, []
    (results,) = trainer.validate(module, token_loader(GLOBAL_BATCH, 20))
    again = silent_trainer(strategy=FSDPStrategy(tensor_parallel=2), devices=2, max_steps=2)
    again.fit(module, token_loader(GLOBAL_BATCH))
    return results["val_loss"], first, module.losses


def test_a_module_is_evaluated_and_fitted_again_after_a_fit() -> None:
    x, y = token_data().tensors
    gpt = small_gpt()
    gpt.load_state_dict(by_hand([1], None, 2)[1], strict=False)
    for loss, first, second in run_on_ranks(2, fitted_again):
        assert loss == pytest.approx(loss_of(gpt(x[:20]), y[:20]).item(), rel=1e-5)
        assert len(first) == len(second) == 2
        assert second[0] < first[0]


def test_a_module_without_a_plan_is_refused_before_any_process() -> None:
    with refuses(ConfigurationError, "Language.configure_tensor_parallel"):
        FSDPStrategy(tensor_parallel=2).check_module(Language())
    with refuses(ConfigurationError, "SmallGPT.configure_tensor_parallel"):
        FSDPStrategy(tensor_parallel=2).check_module(small_gpt())
    FSDPStrategy(tensor_parallel=2).check_module(Parallel())
