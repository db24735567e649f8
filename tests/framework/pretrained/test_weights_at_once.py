"""The line after ``load_pretrained`` in ``configure_model`` finds the weights, under every strategy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import VOCABULARY, FineTuned, loader, model_class, tiny_config, written
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.parallel.full_tensors import whole_tensors
from phalanx.framework.pretrained.weight_folder import FileTensor
from phalanx.framework.state.module_state import model_state

NEW = 4


class Edited(FineTuned):
    """Copies the model, its rows and a mean, resizes its embeddings, and changes a norm."""

    def configure_model(self) -> None:
        with torch.device("meta" if self.empty else "cpu"):
            self.net = model_class(self.kind).from_config(tiny_config(self.kind))
        self.load_pretrained(self.folder or "", **self.options)
        self.reference = copy.deepcopy(self.net).requires_grad_(False)
        self.edit()

    def edit(self) -> None:
        embedding, norm = self.net.get_input_embeddings(), self.net.model.norm
        self.head = nn.Linear(16, VOCABULARY + NEW, bias=False)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.weight[:VOCABULARY] = embedding.weight
            self.head.weight[VOCABULARY:] = embedding.weight.mean(0)
            norm.weight.mul_(2)
            self.net.model.layers[0].mlp.up_proj.weight.data[0] = 3.0
        self.net.resize_token_embeddings(VOCABULARY + NEW, mean_resizing=False)
        self.norm = float(self.net.model.layers[0].mlp.down_proj.weight.detach().norm())

    def on_train_start(self) -> None:
        state = model_state(self.trainer.strategy, self)
        if self.trainer.strategy.traits.replicates:
            self.started = {name: one.tensor.clone() for name, one in state.items()}
        else:
            self.started = {name: tensor.clone() for name, tensor in whole_tensors(state, self.fabric.world)}


class ByHand(Edited):
    """The same with ``from_pretrained``."""

    def configure_model(self) -> None:
        self.net = model_class(self.kind).from_pretrained(self.folder)
        self.reference = copy.deepcopy(self.net).requires_grad_(False)
        self.edit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("llama", tmp_path_factory.mktemp("folders") / "llama")


Started = tuple[dict[str, Tensor], float]


def started(kind: type[Edited], strategy: Any, ranks: int, folder: Path, empty: bool) -> Started:
    torch.manual_seed(3)
    module = kind("llama", folder, empty)
    silent_trainer(strategy=strategy, devices=ranks, max_steps=1).fit(module, loader(ranks))
    return module.started, module.norm


@pytest.mark.parametrize(
    ("strategy", "ranks", "empty"),
    [
        ("single", 1, False),
        ("ddp", 2, False),
        ("fsdp", 2, False),
        ("fsdp", 2, True),
        ("zero3", 2, True),
    ],
)
def test_copies_and_edits_after_the_call_are_those_of_from_pretrained(
    strategy: str, ranks: int, empty: bool, folder: Path
) -> None:
    expected, norm = started(ByHand, "single", 1, folder, False)
    for found, own in run_on_ranks(ranks, started, Edited, strategy, ranks, folder, empty, timeout=180):
        assert own == pytest.approx(norm)
        for name, tensor in found.items():
            # The new rows are initialized, from another state of the generator.
            rows = slice(VOCABULARY if name.endswith(("embed_tokens.weight", "lm_head.weight")) else None)
            torch.testing.assert_close(tensor.cpu()[rows], expected[name][rows], rtol=0, atol=1e-7, msg=name)
            assert tensor.isfinite().all()
            assert tensor.shape == expected[name].shape
        assert not found or len(found) == len(expected)


def test_weights_that_no_line_needs_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = FileTensor.read
    names: list[str] = []

    def counted(tensor: FileTensor) -> Tensor:
        names.append(tensor.name)
        return read(tensor)

    monkeypatch.setattr(FileTensor, "read", counted)
    silent_trainer(max_steps=1).fit(FineTuned("llama", folder), loader())
    assert len(names) == len(set(names))


class CopiedEmpty(FineTuned):
    def configure_model(self) -> None:
        super().configure_model()
        self.copy = copy.deepcopy(self.net)


class ResizedEmpty(FineTuned):
    def configure_model(self) -> None:
        super().configure_model()
        self.net.resize_token_embeddings(VOCABULARY + NEW, mean_resizing=False)


class CopiedEarly(FineTuned):
    """Asks for the weights before a strategy is there."""

    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__(kind, folder)
        super().configure_model()
        self.copy = copy.deepcopy(self.net)


def test_a_copy_without_weights_is_refused(folder: Path) -> None:
    with refuses(ConfigurationError, "copy.model.embed_tokens", "load_pretrained"):
        silent_trainer().fit(CopiedEmpty("llama", folder, empty=True), loader())
    with refuses(ConfigurationError, "lm_head.weight", "meta"):
        silent_trainer().fit(ResizedEmpty("llama", folder, empty=True), loader())
    with refuses(ConfigurationError, "copy.model.embed_tokens", "configure_model"):
        silent_trainer().fit(CopiedEarly("llama", folder), loader())


def test_a_resumed_fit_needs_no_folder(folder: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    written("llama", moved)
    first, module = silent_trainer(max_steps=1, default_root_dir=tmp_path), Edited("llama", moved)
    first.fit(module, loader())
    first.save_checkpoint(tmp_path / "one.ckpt")
    moved.rename(tmp_path / "elsewhere")
    again = Edited("llama", None)
    again.folder = moved
    silent_trainer(max_steps=1).fit(again, loader(), ckpt_path=tmp_path / "one.ckpt")
    assert torch.equal(again.reference.model.norm.weight, module.reference.model.norm.weight)
