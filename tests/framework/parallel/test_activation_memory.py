"""``Trainer(memory=...)``: blocks keep activations in other ways, and compute the same bits under every strategy."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from language_model import LanguageModel, token_loader, tokens
from messages import refuses
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.parallel.activation_memory import _is_kept, activation_memory

# All three ways; each on its own is that of test_gradients_are_the_same_and_fewer_bytes_are_kept.
WORDS: list[Any] = ["blocks", {"blocks.0": "offload", "blocks.*": "selective"}]


class Dropping(LanguageModel):
    """Three blocks with dropout."""

    def __init__(self) -> None:
        super().__init__(blocks=3)
        for block in self.blocks:
            block.narrow = nn.Sequential(block.narrow, nn.Dropout(0.3))  # type: ignore[arg-type]

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        return {}


def trained(strategy: str, ranks: int, memory: Any, precision: str) -> list[float]:
    module = Dropping()
    trainer = silent_trainer(
        strategy=strategy,
        devices=ranks,
        precision=precision,
        max_steps=2,
        accumulate_grad_batches=2,
        memory=memory,
    )
    trainer.fit(module, token_loader(64, 4))
    assert all("forward" not in vars(part) for part in module.modules())
    return module.losses


@pytest.mark.parametrize(
    ("strategy", "ranks", "precision"),
    [
        ("single", 1, "32-true"),
        ("ddp", 2, "32-true"),
        ("fsdp", 2, "bf16-mixed"),
        ("zero3", 2, "32-true"),
    ],
)
def test_losses_are_the_same_bit_for_bit(strategy: str, ranks: int, precision: str) -> None:
    expected = run_on_ranks(ranks, trained, strategy, ranks, None, precision, timeout=120.0)
    for memory in WORDS:
        assert run_on_ranks(ranks, trained, strategy, ranks, memory, precision, timeout=120.0) == expected, memory


def step(memory: Any) -> tuple[float, Tensor, int]:
    """Return the loss and the gradients of a step, and the bytes that are kept for the backward pass."""
    torch.manual_seed(0)
    module, sizes, alive = Dropping(), dict[int, int](), list[Tensor]()

    def record(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    resolved = activation_memory(memory, compiles=False)
    if resolved is not None:
        resolved.apply(module, record)
    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        loss = module.loss(tokens(8))
    loss.backward()
    return (
        loss.item(),
        torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None]),
        sum(sizes.values()),
    )


def test_gradients_are_the_same_and_fewer_bytes_are_kept() -> None:
    loss, gradients, plain = step(None)
    kept = {}
    for word in ("blocks", "selective", "offload"):
        found, own, kept[word] = step(word)
        assert found == loss
        assert torch.equal(own, gradients)
    assert kept["offload"] == kept["blocks"] < kept["selective"] < plain


def test_the_plan_counts_what_is_kept() -> None:
    def activations(memory: Any) -> int:
        trainer = silent_trainer(memory=memory, max_steps=1)
        found: int = trainer.plan(LanguageModel(blocks=3), token_loader(64, 4))["ddp"].needs.device.activations
        return found

    plain, selective, blocks = (activations(word) for word in (None, "selective", "blocks"))
    assert blocks < selective < plain


def test_a_copy_of_a_block_has_its_plain_forward() -> None:
    module = Dropping()
    undo = activation_memory("blocks", compiles=False).apply(module)  # type: ignore[union-attr]
    assert "forward" in vars(module.blocks[0])
    copied = copy.deepcopy(module.blocks[0])
    assert vars(copied)["forward"].__self__ is copied
    undo()
    assert "forward" not in vars(module.blocks[0])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"memory": "block"}, "memory='block'"),
        ({"memory": {"*": "full"}}, "memory='full'"),
        ({"memory": {}}, "memory={}"),
        ({"memory": "blocks", "compile": True}, "memory='blocks'"),
    ],
)
def test_wrong_words_are_refused(arguments: Mapping[str, Any], name: str) -> None:
    with refuses(ConfigurationError, name):
        silent_trainer(**arguments)


def causal_model(kind: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if kind == "gpt2":
        rates = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=3, n_head=2, n_positions=32, **rates))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))


def backward(net: Any, filled: bool, use_cache: bool = True) -> Tensor:
    """Return the loss and all gradients of a batch, with a cache that is empty, or filled by a prefix."""
    from transformers import DynamicCache

    torch.manual_seed(1)
    ids = torch.randint(50, (2, 8))
    cache = None
    if filled:
        cache = DynamicCache(config=net.config)
        with torch.no_grad():
            net(input_ids=ids[:, :3], past_key_values=cache)
    loss = net(input_ids=ids, labels=ids, past_key_values=cache, use_cache=True).loss
    loss.backward()
    return torch.cat(
        [loss.detach()[None], *(each.grad.flatten() for each in net.parameters() if each.grad is not None)]
    )


@pytest.mark.parametrize(
    ("word", "kind", "filled"),
    [
        *(("blocks", "gpt2", False), ("blocks", "llama", True), ("selective", "gpt2", True)),
        *(("selective", "llama", False), ("offload", "gpt2", True), ("offload", "llama", False)),
    ],
)
def test_blocks_of_transformers_with_caches_are_computed_again(word: str, kind: str, filled: bool) -> None:
    net = causal_model(kind)
    undo = activation_memory(word, compiles=False).apply(net)  # type: ignore[union-attr]
    found = backward(net, filled)
    undo()
    # A block that is computed again has no cache, so its keys have the memory layout of one without it.
    assert torch.equal(found, backward(causal_model(kind), filled, use_cache=filled or word == "offload"))


def test_a_tensor_that_is_changed_in_place_is_offloaded_as_it_was() -> None:
    class Changing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            squared = x.square()
            x.zero_()
            return squared

    parts = nn.ModuleList([Changing(1, 1), Changing(1, 1)])
    activation_memory("offload", compiles=False).apply(nn.Sequential(parts))  # type: ignore[union-attr]
    start = torch.tensor([3.0], requires_grad=True)
    parts[0](start + 0).backward()
    assert start.grad == torch.tensor([6.0])


def test_attention_with_dropout_is_computed_again() -> None:
    """A kept result would not advance the generator, so later dropouts would get other random numbers."""

    class Attending(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            query = super().forward(x).view(4, 2, 8, 8)
            attended = nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
            return nn.functional.dropout(attended, 0.5).view(64, 8)

    def gradient(word: str | None) -> Tensor:
        torch.manual_seed(0)
        net = nn.Sequential(Attending(8, 8), Attending(8, 8))
        if word is not None:
            activation_memory(word, compiles=False).apply(nn.ModuleList([net]))  # type: ignore[union-attr]
        net(torch.randn(64, 8)).sum().backward()
        return torch.cat([each.grad.flatten() for each in net.parameters() if each.grad is not None])

    assert torch.equal(gradient("selective"), gradient(None))


def test_results_are_kept_but_for_those_with_random_numbers() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    assert _is_kept(flash, (None, None, None), {})
    assert not _is_kept(flash, (None, None, None, 0.1), {})
    assert not _is_kept(flash, (None, None, None), {"dropout_p": 0.1})
    assert not _is_kept(torch.ops.aten.relu.default, (), {})


class Single(Regressor):
    """A module without a list of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 1))


def test_modules_without_such_blocks_are_refused() -> None:
    with refuses(ConfigurationError, "memory='blocks'", "Single"):
        silent_trainer(memory="blocks", max_steps=1).fit(Single(), loader())
    with refuses(ConfigurationError, "'block.9'", "'blocks.2'"):
        silent_trainer(memory={"block.9": "blocks"}, max_steps=1).fit(Dropping(), token_loader(8))
