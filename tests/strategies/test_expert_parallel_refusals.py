"""Expert parallelism: what cannot be divided is refused before any rank starts, with what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from long_sequences import WIDTH, LongModel, loader
from messages import refuses, says
from models import Regressor, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx.errors import ConfigurationError


def refusal(module: Any, ranks: int = 4, **settings: Any) -> str:
    given = {"strategy": "fsdp", "devices": ranks, "parallel": {"ep": 2}, "verbose": False, **settings}
    with refuses(ConfigurationError) as caught:
        silent_trainer(**given).fit(module, loader(4))
    return str(caught.value)


class Named(LongModel):
    def __init__(self, names: Any, experts: int = 6) -> None:
        super().__init__(experts=experts)
        self.names = names

    def configure_expert_parallel(self) -> Any:
        return self.names


def changed(change: str) -> LongModel:
    """Return a model whose first layer of experts has something that is not stacked, or shared."""
    module = LongModel(experts=6)
    experts: Any = module.blocks[0].get_submodule("mixture.experts")
    if change == "parameter":
        experts.scale = nn.Parameter(torch.ones(WIDTH))
    elif change == "buffer":
        experts.register_buffer("load", torch.zeros(6))
    else:
        module.blocks[1].get_submodule("mixture.experts").widen = experts.widen
    return module


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (Regressor(), ["Regressor", "configure_expert_parallel()"]),
        (Named([]), ["Named"]),
        (Named("blocks.*"), ["str"]),
        (Named(["blocks.*.mixtur.experts"]), ["'blocks.*.mixtur.experts'"]),
        (Named([nn.Linear(1, 1)]), ["Linear"]),
        (Named(["blocks.0.mixture"]), ["blocks.0.mixture (Mixture)"]),
        (changed("parameter"), ["blocks.0.mixture.experts (Experts)", "experts.scale", "[16]"]),
        (changed("buffer"), ["blocks.0.mixture.experts", "load"]),
        (changed("tie"), ["experts.widen", "'blocks.1.mixture.experts'"]),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(module: Any, words: list[str]) -> None:
    message = refusal(module)
    assert all(each in message for each in words), message


def test_a_degree_that_does_not_divide_the_experts_is_refused_with_those_that_do() -> None:
    message = refusal(LongModel(experts=6), parallel={"ep": 4})
    assert "parallel={'ep': 4}" in message
    assert "1, 2, 3, 6" in message


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "ddp"}, ["strategy='ddp'", "strategy='fsdp'"]),
        ({"parallel": {"ep": 2, "pp": 2}}, ["leave"]),
        ({"compile": {"backend": "eager"}}, ["compile", "ep"]),
        ({"precision": "fp8"}, ["ep=2", "'bf16-mixed'"]),
        ({"micro_batch_size": "auto", "global_batch_size": 8}, ["strategy='fsdp'", "micro_batch_size='auto'"]),
    ],
)
def test_settings_that_do_not_go_with_it_are_refused(settings: dict[str, Any], words: list[str]) -> None:
    message = refusal(LongModel(experts=6), **settings)
    assert all(each in message for each in words), message


class Quantized(LongModel):
    def configure_optimizers(self) -> Any:
        from torchao.optim import AdamW8bit

        return AdamW8bit(self.parameters())


class CalledOtherwise(LongModel):
    """Gives its experts a sequence for each sample in place of tokens."""

    def __init__(self) -> None:
        super().__init__(experts=6)
        for block in self.blocks:
            mixture: Any = block.get_submodule("mixture")
            mixture.forward = lambda x, mixture=mixture: mixture.experts(x, *self.choice(x))

    def choice(self, x: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.zeros(x.shape[0], x.shape[1], 2, dtype=torch.long)
        return index, torch.ones(index.shape)


class SplitTwice(LongModel):
    def __init__(self) -> None:
        super().__init__(experts=6)

    def configure_tensor_parallel(self, mesh: Any) -> Any:
        from torch.distributed.tensor import Shard, distribute_tensor

        for block in self.blocks:
            experts: Any = block.get_submodule("mixture.experts")
            experts.widen = nn.Parameter(distribute_tensor(experts.widen.detach(), mesh, [Shard(2)]))
        return None


def refused_on_ranks(kind: str, parallel: dict[str, int]) -> str:
    modules: dict[str, Any] = {
        "quantized": lambda: Quantized(experts=6),
        "otherwise": CalledOtherwise,
        "twice": SplitTwice,
    }
    trainer = silent_trainer(
        strategy="fsdp", devices=2 * parallel.get("tp", 1), parallel=parallel, max_steps=1, verbose=False
    )
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(modules[kind](), loader(4))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "parallel", "words"),
    [
        ("quantized", {"ep": 2}, "AdamW8bit"),
        ("otherwise", {"ep": 2}, "[4, 12, 16], [4, 12, 2], [4, 12, 2]"),
        ("twice", {"ep": 2, "tp": 2}, "Experts.widen"),
    ],
)
def test_what_is_known_on_the_ranks_only_is_refused_on_all_of_them(
    kind: str, parallel: dict[str, int], words: str
) -> None:
    says(run_on_ranks(2 * parallel.get("tp", 1), refused_on_ranks, kind, parallel), words)
