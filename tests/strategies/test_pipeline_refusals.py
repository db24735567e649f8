"""Pipelines refuse configurations that they cannot train, before the ranks start where that can be known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from language_model import LanguageModel, token_loader
from messages import refuses
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import TrainModule
from phalanx.errors import ConfigurationError, LoopError, UnknownNameError
from phalanx.strategies import FSDPStrategy, PipelineStrategy


def fit(module: Any, data: Any = None, strategy: Any = "pipeline", ranks: int = 2, **settings: Any) -> None:
    settings = {"accumulate_grad_batches": 4, "max_steps": 1, **settings}
    silent_trainer(devices=ranks, strategy=strategy, **settings).fit(module, data or token_loader(64))


class Manual(LanguageModel):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Unlisted(Regressor):
    def configure_pipeline(self) -> Any:
        return "net"


@pytest.mark.parametrize(
    ("attempt", "words"),
    [
        (lambda: fit(LanguageModel(3), ranks=4), ["pp=4", "3 blocks", "2, 3 stages"]),
        (
            lambda: fit(LanguageModel(3), strategy=PipelineStrategy("zero-bubble-v")),
            ["4 stages", "3 blocks", "2, 3 stages"],
        ),
        (lambda: fit(LanguageModel(1)), ["LanguageModel", "configure_pipeline"]),
        (lambda: fit(Unlisted(), loader()), ["str", "configure_pipeline"]),
        (lambda: fit(LanguageModel(), ranks=1), ["1 rank", "devices=2", "'single'"]),
        (
            lambda: fit(LanguageModel(), ranks=4, parallel={"pp": 1}),
            ["1 rank", "{'pp': ...}", "'ddp'"],
        ),
        (lambda: fit(LanguageModel(), ranks=4, parallel={"pp": 3}), ["pp=3", "1, 2, 4"]),
        (lambda: fit(LanguageModel(), ranks=4, parallel={"pp": 2, "ep": 2}), ["cp, tp and pp", "ep out"]),
        (lambda: fit(LanguageModel(), ranks=4, parallel={"pp": 2, "cp": 2}), ["LanguageModel.cut_sequences"]),
        (lambda: fit(LanguageModel(), strategy="ddp", parallel={"pp": 2}), ["strategy='pipeline'"]),
        (
            lambda: fit(LanguageModel(), ranks=4, strategy=FSDPStrategy(units=2, prefetch=1), parallel={"pp": 2}),
            ["FSDPStrategy(units=..., prefetch=...)", "pp out"],
        ),
        (lambda: fit(LanguageModel(), ranks=4, strategy="hsdp", parallel={"pp": 2}), ["FSDPStrategy(replicas=...)"]),
        (lambda: fit(LanguageModel(), ranks=4, strategy="fsdp", parallel={"pp": 4}), ["2 blocks", "2 stages"]),
        (lambda: fit(Manual(), accumulate_grad_batches=1), ["automatic_optimization", "fsdp"]),
        (
            lambda: fit(LanguageModel(), accumulate_grad_batches=1, global_batch_size=8, micro_batch_size="auto"),
            ["micro_batch_size='auto'", "'pipeline'"],
        ),
        (lambda: fit(LanguageModel(), precision="fp8"), ["precision='fp8-mixed'", "pipeline"]),
        (lambda: PipelineStrategy("1f1b", stages_per_rank=2), ["1f1b", "'interleaved-1f1b'"]),
        (lambda: PipelineStrategy("zero-bubble-v", stages_per_rank=3), ["zero-bubble-v"]),
        (lambda: PipelineStrategy(stages_per_rank=0), ["stages_per_rank=0"]),
    ],
)
def test_a_configuration_is_refused_before_the_ranks_start(attempt: Callable[[], None], words: list[str]) -> None:
    with refuses(ConfigurationError, *words):
        attempt()


def test_an_unknown_schedule_names_the_closest() -> None:
    with refuses(UnknownNameError, "'1f1'", "'1f1b'"):
        PipelineStrategy("1f1")


# ---- in the run ----------------------------------------------------------------------------------------------------


class Auxiliary(LanguageModel):
    """Adds something of the first block's output to the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = hidden = self.blocks[0](self.embed(batch[0]))
        for block in self.blocks[1:]:
            hidden = block(hidden)
        return hidden.mean() + first.square().mean()  # type: ignore[no-any-return]


class Reading(LanguageModel):
    """Reads a value of the first block's output on the host."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first = self.blocks[0](self.embed(batch[0]))
        return self.blocks[1](first if float(first.mean()) < 1e9 else -first).mean()  # type: ignore[no-any-return]


class Twice(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0]) + self.loss(batch[0])


class Backwards(LanguageModel):
    def configure_pipeline(self) -> list[nn.Module]:
        return list(reversed(self.blocks))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x.mean()


class OfPairs(TrainModule):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair() for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for pair in self.pairs:
            x, _ = pair(x)
        return x.square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hooked(LanguageModel):
    def on_after_backward(self) -> None:
        pass


class NormsOfAll(LanguageModel):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms = [each.grad.norm() for each in self.parameters() if each.grad is not None]


class Decayed(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0]) + 0.1 * sum(each.square().sum() for each in self.blocks.parameters())


class HookedParameter(LanguageModel):
    def on_fit_start(self) -> None:
        self.embed.weight.register_hook(lambda gradient: gradient * 2)


class Gathering(LanguageModel):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.all_gather(batch[0])
        return self.loss(batch[0])


def message_of(name: str) -> str:
    module = globals()[name](*([4] if name == "Auxiliary" else []))
    data = loader() if name == "OfPairs" else None
    try:
        fit(module, data)
    except (LoopError, ConfigurationError) as error:
        return str(error)
    raise AssertionError("it trained")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Auxiliary", "the output of the last block only"),
        ("Reading", "the output of the last block only"),
        ("Twice", "a second time"),
        ("Backwards", "in the order of their calls from configure_pipeline"),
        ("OfPairs", "a block returned tuple"),
        ("Hooked", "use on_before_optimizer_step"),
        ("NormsOfAll", "another stage of the pipeline holds"),
        ("Decayed", "another stage of the pipeline holds"),
        ("HookedParameter", "change gradients in on_before_optimizer_step"),
        ("Gathering", "all_gather was called in training_step"),
    ],
)
def test_a_step_that_a_pipeline_cannot_divide_is_refused(name: str, words: str) -> None:
    with pytest.raises(AssertionError, match=r"(?s).*") as failed:
        # The rank that computes the loss refuses it, while others may wait for it.
        run_on_ranks(2, raising, name, timeout=60.0)
    assert words in str(failed.value)


def raising(name: str) -> None:
    raise AssertionError(message_of(name))


class Quantized(LanguageModel):
    def configure_optimizers(self) -> Any:
        optim = pytest.importorskip("torchao.optim")
        return optim.AdamW8bit(self.parameters(), lr=1e-3)


def refused_quantized_state() -> None:
    with pytest.raises(ConfigurationError, match="AdamW8bit"):
        fit(Quantized())


def test_quantized_state_is_refused() -> None:
    pytest.importorskip("torchao.optim")
    run_on_ranks(2, refused_quantized_state)
