"""Plans that models of transformers bring along: tensor parallelism without a plan of the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Callback, TrainModule
from phalanx.errors import ConfigurationError
from phalanx.hf import TransformersModule

STEPS, GLOBAL_BATCH, LENGTH, VOCABULARY = 3, 4, 8, 48


def config(kind: str, tied: bool = False, **others: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
    return transformers.AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        tie_word_embeddings=tied,
        **{**sizes, **others},
    )


def model(given: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(5)
    net = transformers.AutoModelForCausalLM.from_config(given)
    with torch.no_grad():
        for parameter in net.parameters():
            # Biases and norms differ from their initial values too.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return net


def rows() -> list[dict[str, Tensor]]:
    tokens = torch.randint(0, VOCABULARY, (STEPS * GLOBAL_BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": each, "labels": each} for each in tokens]


class Noted(TransformersModule):
    """Notes the loss of each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses = [*getattr(self, "losses", []), loss.item()]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(
    given: Any, strategy: str, ranks: int, parallel: dict[str, int] | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    module = Noted(model(given))
    trainer = silent_trainer(
        strategy=strategy, devices=ranks, max_steps=STEPS, gradient_clip_val=0.5, verbose=False, parallel=parallel
    )
    size = GLOBAL_BATCH // trainer.fabric.resources.data_size
    trainer.fit(module, DataLoader(rows(), batch_size=size))  # type: ignore[arg-type]
    if not all(parameter.device.type == "cpu" for parameter in module.parameters()):
        return module.losses, {}
    return module.losses, {name: each.detach() for name, each in module.named_parameters()}


@pytest.mark.parametrize(("kind", "tied", "strategy"), [("llama", False, "fsdp"), ("qwen3", True, "ddp")])
def test_a_model_is_split_by_its_own_plan(kind: str, tied: bool, strategy: str) -> None:
    losses, weights = trained(config(kind, tied), "single", 1)
    for own, full in run_on_ranks(2, trained, config(kind, tied), strategy, 2, {"tp": 2}):
        torch.testing.assert_close(own, losses, rtol=1e-5, atol=0)
        if full:
            torch.testing.assert_close(full, weights, rtol=1e-4, atol=1e-6)


def layers_of(given: Any) -> dict[str, tuple[int, ...]]:
    module, shapes = Noted(model(given)), {}

    class Looks(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "input_layernorm"):
                weight = module.model.model.layers[0].get_submodule(name).weight
                shapes[name] = tuple(weight.to_local().shape)
            shapes["lm_head"] = tuple(module.model.lm_head.weight.to_local().shape)

    trainer = silent_trainer(strategy="ddp", devices=2, parallel={"tp": 2}, max_steps=1, callbacks=Looks())
    trainer.fit(module, DataLoader(rows(), batch_size=2))  # type: ignore[arg-type]
    return shapes


def test_each_rank_holds_its_part_of_the_layers_in_the_plan() -> None:
    for shapes in run_on_ranks(2, layers_of, config("llama")):
        assert shapes == {
            "self_attn.q_proj": (16, 32),
            "self_attn.o_proj": (32, 16),
            "mlp.up_proj": (24, 32),
            "input_layernorm": (32,),
            "lm_head": (VOCABULARY // 2, 32),
        }


@pytest.mark.parametrize(
    ("given", "degree", "words"),
    [({}, 4, "num_key_value_heads"), ({"intermediate_size": 45}, 2, "mlp.gate_proj.out_features")],
)
def test_degrees_that_do_not_divide_a_model_are_refused_with_those_that_do(
    given: dict[str, int], degree: int, words: str
) -> None:
    module = TransformersModule(model(config("llama", False, **given)))
    trainer = silent_trainer(strategy="fsdp", devices=4, parallel={"tp": degree}, verbose=False)
    with refuses(ConfigurationError, words):
        trainer.fit(module, DataLoader(rows(), batch_size=1))  # type: ignore[arg-type]


def test_a_style_that_is_not_known_is_refused_by_name() -> None:
    net = model(config("llama"))
    net._tp_plan = {**net._tp_plan, "model.layers.*.mlp.up_proj": "packed_colwise"}
    trainer = silent_trainer(strategy="fsdp", devices=2, parallel={"tp": 2}, verbose=False)
    with refuses(
        ConfigurationError, "model.layers", "mlp.up_proj", "'packed_colwise'", "configure_tensor_parallel(mesh)"
    ):
        trainer.fit(TransformersModule(net), DataLoader(rows(), batch_size=1))  # type: ignore[arg-type]


class Hooked(TrainModule):
    """Has a plan of its own, which comes before that of its model."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module = model(config("llama"))

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_plan_of_the_module_comes_first() -> None:
    trainer = silent_trainer(strategy="fsdp", devices=4, parallel={"tp": 4}, verbose=False)
    trainer.strategy.check_module(Hooked())  # four ranks do not divide the heads of the model's own plan


def test_sequences_of_a_model_are_shared() -> None:
    losses, weights = trained(config("llama"), "single", 1)
    assert len(losses) == STEPS
    for _, full in run_on_ranks(2, trained, config("llama"), "fsdp", 2, {"cp": 2}):
        if full:
            torch.testing.assert_close(full, weights, rtol=1e-4, atol=1e-6)
