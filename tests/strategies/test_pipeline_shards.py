"""Pipelines whose stages are sharded: what a rank holds, full gradients, clipping of values, freezing, refusals."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from language_model import Block, LanguageModel, token_loader, tokens
from messages import refuses, says
from models import silent_trainer, weights_of
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Callback
from phalanx.errors import ConfigurationError
from phalanx.strategies import FSDPStrategy, PipelineStrategy

SHARDED = "pp=2,dp_shard=2"
CLIP = 0.01


class Plain(LanguageModel):
    def __init__(self) -> None:
        super().__init__(blocks=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


def fitted(module: LanguageModel, callback: Callback | None = None, **settings: Any) -> Any:
    settings = {"parallel": SHARDED, "max_steps": 4, "accumulate_grad_batches": 4, **settings}
    callbacks = [] if callback is None else [callback]
    trainer = silent_trainer(devices=4, strategy="pipeline", callbacks=callbacks, **settings)
    trainer.fit(module, token_loader(64, batch_size=2))
    return trainer


def by_hand(rows: int = 16, frozen_from: int = 99, clips: bool = False, module: Plain | None = None) -> Tensor:
    module = module or Plain()
    optimizer = module.configure_optimizers()
    for number, batch in enumerate(tokens(64).split(rows)[:4]):
        module.blocks[3].requires_grad_(number < frozen_from)
        optimizer.zero_grad()
        module.loss(batch).backward()
        if clips:
            nn.utils.clip_grad_value_(module.parameters(), CLIP)
        optimizer.step()
    return weights_of(module)


# ---- what a rank holds ---------------------------------------------------------------------------------------------


class Held(Callback):
    """Notes how much this rank holds of parameters, gradients and optimizer state, and full gradients."""

    def __init__(self) -> None:
        self.parameters = self.gradients = self.state = 0
        self.full: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        own = [each for each in module.parameters() if not each.is_meta]
        self.gradients = sum(_size(each.grad) for each in own if each.grad is not None)
        if not self.full:
            gradients = trainer.strategy.gradients
            self.full = {name: gradients.full(each).clone() for name, each in module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.parameters = sum(_size(each) for each in module.parameters() if not each.is_meta)
        states = trainer.optimizers[0].state.values()
        self.state = sum(_size(state["momentum_buffer"]) for state in states if "momentum_buffer" in state)


def _size(tensor: Any) -> int:
    return int(getattr(tensor, "_local_tensor", tensor).numel())


def held() -> tuple[tuple[int, int, int], dict[str, Tensor]]:
    callback = Held()
    fitted(Plain(), callback)
    return (callback.parameters, callback.gradients, callback.state), callback.full


def test_a_rank_holds_its_shards_between_windows_and_finds_full_gradients() -> None:
    results = run_on_ranks(4, held)
    module = Plain()
    module.loss(tokens(64)[:16]).backward()

    blocks = sum(each.numel() for each in module.blocks.parameters())
    outside = sum(each.numel() for each in module.parameters()) - blocks
    for sizes, full in results:
        # Of two stages and two shards; rows of odd numbers are divided unevenly.
        assert all(size == pytest.approx(blocks / 4 + outside / 2, rel=0.05) for size in sizes)
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(full[name], parameter.grad, rtol=1e-4, atol=1e-6)


def messages(window: int) -> tuple[int, int]:
    """Return how often a rank gathers shards and reduces gradients in one window."""
    seen: list[str] = []
    with ExitStack() as stack:
        # Newer versions of torch have other names.
        for name in ("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"):
            if plain := getattr(dist, name, None):
                stack.enter_context(mock.patch.object(dist, name, partial(_noted, seen, name, plain)))
        fitted(Plain(), max_steps=1, accumulate_grad_batches=window)
    return sum("gather" in name for name in seen), sum("scatter" in name for name in seen)


def _noted(seen: list[str], name: str, plain: Any, *args: Any, **kwargs: Any) -> Any:
    seen.append(name)
    return plain(*args, **kwargs)


def test_a_window_gathers_and_reduces_once_for_each_block() -> None:
    # Two blocks on each rank, and what is outside of them.
    for window in (1, 4):
        assert run_on_ranks(4, messages, window) == [(3, 3)] * 4


# ---- updates -------------------------------------------------------------------------------------------------------


class Freezing(Callback):
    """Freezes a block of the last stage after two steps."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2:
            module.blocks[3].requires_grad_(False)


def weights(freezes: bool, parallel: str) -> Tensor | None:
    module = Plain()
    settings: dict[str, Any] = {"gradient_clip_val": CLIP, "gradient_clip_algorithm": "value"}
    fitted(module, *([Freezing()] if freezes else []), parallel=parallel, **({} if freezes else settings))
    return None if any(each.is_meta for each in module.parameters()) else weights_of(module)


@pytest.mark.parametrize("parallel", [SHARDED, "pp=2,tp=2"])
def test_clipping_of_values_reaches_all_shards(parallel: str) -> None:
    found = run_on_ranks(4, weights, False, parallel)[0]
    assert found is not None
    rows = 16 if parallel == SHARDED else 8
    torch.testing.assert_close(found, by_hand(rows, clips=True), rtol=1e-5, atol=1e-6)


def test_a_block_can_be_frozen_during_a_fit() -> None:
    found = run_on_ranks(4, weights, True, SHARDED)[0]
    assert found is not None
    torch.testing.assert_close(found, by_hand(frozen_from=2), rtol=1e-5, atol=1e-6)


class Sharing(Plain):
    """Blocks of one stage share a norm, those of both stages another one, and one element is outside of them."""

    def __init__(self) -> None:
        super().__init__()
        first, second, _, last = cast(list[Block], self.blocks)
        second.norm_mlp, last.norm_attention = first.norm_mlp, first.norm_attention
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.scale


def shared() -> Tensor | None:
    module = Sharing()
    fitted(module)
    return None if any(each.is_meta for each in module.parameters()) else weights_of(module)


def test_weights_that_blocks_and_stages_share_stay_shared() -> None:
    found = run_on_ranks(4, shared)[0]
    assert found is not None
    torch.testing.assert_close(found, by_hand(module=Sharing()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("strategy", "parallel", "layout"),
    [
        ("fsdp", "pp=2", "dp_shard=2 x pp=2"),
        ("fsdp", "pp=2,dp_replicate=2", "dp_replicate=2 x pp=2"),
        (FSDPStrategy(tensor_parallel=2), "pp=2", "tp=2 x pp=2"),
        ("pipeline", "pp=2", "dp_replicate=2 x pp=2"),
        ("pipeline", "dp_shard=2", "dp_shard=2 x pp=2"),
    ],
)
def test_fsdp_with_stages_is_a_pipeline_of_shards(strategy: Any, parallel: str, layout: str) -> None:
    trainer = silent_trainer(devices=4, strategy=strategy, parallel=parallel)
    assert isinstance(trainer.strategy, PipelineStrategy)
    assert str(trainer.fabric.resources.layout) == layout


# ---- refusals ------------------------------------------------------------------------------------------------------


class Whole(torch.optim.SGD):
    updates_full_parameters = True


class UpdatedWhole(Plain):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Whole(self.parameters(), lr=0.1)


def refused() -> str:
    with pytest.raises(ConfigurationError) as error:
        fitted(UpdatedWhole())
    return str(error.value)


def test_an_optimizer_of_full_parameters_is_refused() -> None:
    says(run_on_ranks(4, refused), "Whole", "'dp_replicate': ...")


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ("pp=2,dp_shard=2,ep=2", ["dp_replicate, dp_shard, cp, tp and pp", "ep out"]),
        ("pp=2,dp_shard=3", ["6 ranks"]),
    ],
)
def test_other_axes_and_degrees_that_do_not_fit_are_refused(parallel: str, words: list[str]) -> None:
    with refuses(ConfigurationError, *words):
        fitted(Plain(), parallel=parallel)


class Scalar(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))


def test_parameters_without_dims_are_refused() -> None:
    with refuses(ConfigurationError, "scale is", "dims"):
        fitted(Scalar())


class Unplanned(Plain):
    configure_tensor_parallel = None  # type: ignore[assignment]


def test_layers_without_a_plan_are_refused() -> None:
    with refuses(ConfigurationError, "Unplanned.configure_tensor_parallel"):
        fitted(Unplanned(), parallel="pp=2,tp=2")
