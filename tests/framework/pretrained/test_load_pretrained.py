"""Pretrained weights under every strategy: those of ``from_pretrained``, read by slices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FineTuned, by_hand, loader, model_class, tiny_config, written
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor

from phalanx.framework.parallel.deferred import Recipe
from phalanx.framework.parallel.full_tensors import whole_tensors
from phalanx.framework.state.module_state import model_state
from phalanx.strategies import FSDPStrategy

KINDS = ("gpt2", "llama", "bert")
STEPS = 3


class Observed(FineTuned):
    """Gathers its full state when training begins."""

    def on_train_start(self) -> None:
        strategy, world = self.trainer.strategy, self.fabric.world
        state = model_state(strategy, self)
        self.started = {name: one.tensor.clone() for name, one in state.items()}
        if not strategy.traits.replicates:
            self.started = {name: tensor.clone() for name, tensor in whole_tensors(state, world)}
        self.buffers_at_start = {name: buffer.clone() for name, buffer in self.net.named_buffers()}
        self.is_tied = self.net.get_input_embeddings().weight is self.net.get_output_embeddings().weight


def fitted(strategy: Any, ranks: int, folders: dict[str, Path], empty: bool, by_fit: bool) -> dict[str, Any]:
    found = {}
    for kind, folder in folders.items():
        torch.manual_seed(3)
        module = Observed(kind, None if by_fit else folder, empty)
        trainer = silent_trainer(strategy=strategy, devices=ranks, max_steps=STEPS)
        data = loader(trainer.fabric.world.data_size)
        trainer.fit(module, data, pretrained=folder if by_fit else None)
        found[kind] = module.losses, module.started, module.buffers_at_start, module.is_tied
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders of three models; the weights of Llama are in several files."""
    root = tmp_path_factory.mktemp("folders")
    return {kind: written(kind, root / kind, "5KB" if kind == "llama" else "5GB") for kind in KINDS}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Any]:
    """The losses by hand, and the state and buffers of ``from_pretrained``."""
    found = {}
    for kind, folder in folders.items():
        losses, _ = by_hand(kind, folder, STEPS)
        model = model_class(kind).from_pretrained(folder)
        found[kind] = losses, model.state_dict(), dict(model.named_buffers())
    return found


# What is read of each kind of model does not depend on the strategy: most have the first, or the first two.
@pytest.mark.parametrize(
    ("strategy", "ranks", "empty", "kinds"),
    [
        ("single", 1, False, KINDS),
        ("single", 1, True, KINDS),
        ("ddp", 2, False, KINDS[:2]),
        ("fsdp", 2, False, KINDS[:2]),
        ("fsdp", 3, True, KINDS),
        ("zero2", 3, True, KINDS[:1]),
        ("zero3", 2, False, KINDS[:2]),
        ("zero3", 3, True, KINDS),
    ],
)
def test_weights_and_losses_are_those_of_from_pretrained(
    strategy: str, ranks: int, empty: bool, kinds: tuple[str, ...], folders: dict[str, Path], expected: dict[str, Any]
) -> None:
    chosen = {kind: folders[kind] for kind in kinds}
    results = run_on_ranks(ranks, fitted, strategy, ranks, chosen, empty, ranks == 2 and not empty, timeout=180)
    for kind in kinds:
        losses, state, buffers = expected[kind]
        for _, own, own_buffers, is_tied in (each[kind] for each in results):
            if own:
                assert own.keys() == {f"net.{name}" for name in state}
                assert_equal(own, {f"net.{name}": tensor for name, tensor in state.items()})
            assert_equal(own_buffers, buffers)
            assert is_tied == (kind != "llama")
        means = torch.tensor([each[kind][0] for each in results]).mean(0)
        torch.testing.assert_close(means, torch.tensor(losses), rtol=1e-6, atol=0)


# Layers that are sharded too, on four ranks, are those of test_load_memory.
@pytest.mark.parametrize(("kind", "empty"), [("gpt2", True), ("llama", False)])
def test_layers_that_are_split_over_ranks_are_read_in_boxes(
    kind: str, empty: bool, folders: dict[str, Path], expected: dict[str, Any]
) -> None:
    strategy = FSDPStrategy(tensor_parallel=2)
    results = run_on_ranks(2, fitted, strategy, 2, {kind: folders[kind]}, empty, False, timeout=180)
    losses, state, _ = expected[kind]
    assert_equal(results[0][kind][1], {f"net.{name}": tensor for name, tensor in state.items()})
    means = torch.tensor([each[kind][0] for each in results]).mean(0)
    torch.testing.assert_close(means, torch.tensor(losses), rtol=1e-6, atol=0)


def without_initial_values(strategy: str, folder: Path) -> None:
    def fail(*_: Any) -> Tensor:
        raise AssertionError("the initial value of a parameter was computed")

    value, Recipe.value = Recipe.value, fail  # type: ignore[method-assign, assignment]
    try:
        module = Observed("llama", folder)
        silent_trainer(strategy=strategy, devices=2, max_steps=1).fit(module, loader(2))
    finally:
        Recipe.value = value  # type: ignore[method-assign]


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_weights_that_are_loaded_are_not_initialized_first(strategy: str, folders: dict[str, Path]) -> None:
    run_on_ranks(2, without_initial_values, strategy, folders["llama"], timeout=120)


class Classifier(Observed):
    """A model with a head that the files lack."""

    def configure_model(self) -> None:
        from transformers import BertForSequenceClassification

        with torch.device("meta" if self.empty else "cpu"):
            self.net = BertForSequenceClassification(tiny_config("bert"))
        self.load_pretrained(self.folder or "")

    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        state = model_state(strategy, self)
        whole = whole_tensors(state, self.fabric.world)
        self.started = {name: tensor.clone() for name, tensor in whole if "classifier" in name or "position" in name}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch[:, 0] % 2).loss
        return loss


def new_head(strategy: Any, ranks: int, folder: Path, empty: bool) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = Classifier("bert", folder, empty)
    silent_trainer(strategy=strategy, devices=ranks, max_steps=1).fit(module, loader(ranks))
    return module.started


@pytest.mark.parametrize(("empty", "strategies"), [(False, ("ddp", "zero3")), (True, ("fsdp", "zero3"))])
def test_a_new_head_has_the_same_values_under_every_strategy(
    empty: bool, strategies: tuple[str, ...], folders: dict[str, Path]
) -> None:
    expected = run_on_ranks(1, new_head, "single", 1, folders["bert"], empty)[0]
    assert expected["net.classifier.weight"].std() > 0.01
    for strategy in strategies:
        found = run_on_ranks(2, new_head, strategy, 2, folders["bert"], empty, timeout=120)[0]
        assert found.keys() == expected.keys()
        assert_equal(found, expected)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name].cpu(), tensor), name
