"""Names, shapes, dtypes and ties of pretrained weights, compared with those of the module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FineTuned, loader, model_class, tiny_config, tokens, written
from messages import refuses, says
from models import Regressor, silent_trainer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import TrainModule
from phalanx.framework.core.errors import CheckpointError, ConfigurationError, UnknownNameError
from phalanx.framework.pretrained.weight_folder import SINGLE


def edited(folder: Path, change: Any) -> Path:
    """Change the tensors of a folder's only file."""
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return folder


def gpt2() -> Any:
    return model_class("gpt2").from_config(tiny_config("gpt2"))


class Loaded(TrainModule):
    """Builds a model with ``build`` and asks for weights; predicts with it."""

    def __init__(self, build: Any, *requests: tuple[Any, dict[str, Any]]) -> None:
        super().__init__()
        self.build, self.requests = build, requests
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(9)
            self.net = self.build()
            for path, options in self.requests:
                self.load_pretrained(path, **options)

    def predict_step(self, batch: Tensor, batch_idx: int) -> None:
        pass


def loaded(build: Any, path: Any, **options: Any) -> tuple[Any, list[str]]:
    """Load weights in ``predict``; return the model and the notes."""
    module = Loaded(build, (path, options))
    trainer = silent_trainer()
    notes: list[str] = []
    trainer.note = notes.append  # type: ignore[method-assign, assignment]
    trainer.predict(module, DataLoader(tokens()[:2]))  # type: ignore[arg-type]
    return module.net, notes


def assert_like(found: nn.Module, expected: nn.Module, without: str = "nothing") -> None:
    state = expected.state_dict()
    assert found.state_dict().keys() == state.keys()
    for name, tensor in found.state_dict().items():
        if not name.startswith(without):
            assert torch.equal(tensor, state[name]), name


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_prefix_of_the_base_model_is_added_and_removed(kind: str, tmp_path: Path) -> None:
    from transformers import AutoModel

    full = model_class(kind).from_pretrained(written(kind, tmp_path / "full"))
    base = full.base_model
    base.save_pretrained(tmp_path / "base")
    builder: Any = AutoModel
    own, _ = loaded(lambda: builder.from_config(tiny_config(kind)), tmp_path / "full")
    expected = AutoModel.from_pretrained(tmp_path / "full")
    assert_like(own, expected, "pooler")
    own, _ = loaded(lambda: model_class(kind).from_config(tiny_config(kind)), tmp_path / "base")
    assert torch.equal(own.get_input_embeddings().weight, base.get_input_embeddings().weight)
    assert_like(own.base_model, base, "pooler")


@pytest.mark.parametrize("empty", [False, True])
def test_a_new_head_keeps_its_initial_values_and_is_named(empty: bool, tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    written("bert", tmp_path)
    config = tiny_config("bert", num_labels=3)

    def build() -> Any:
        with torch.device("meta" if empty else "cpu"):
            return BertForSequenceClassification(config)

    own, notes = loaded(build, tmp_path)
    assert_like(own.bert, BertForSequenceClassification.from_pretrained(tmp_path, num_labels=3).bert, "pooler")
    assert own.classifier.weight.std().item() == pytest.approx(config.initializer_range, rel=0.5)
    assert not own.classifier.bias.any()
    assert len(notes) == 1
    assert "classifier.weight: missing in the checkpoint" in notes[0]
    assert "cls.predictions.bias: unknown to the module" in notes[0]
    with refuses(CheckpointError, "classifier.weight"):
        loaded(build, tmp_path, strict=True)


@pytest.mark.parametrize("stored", ["transformer.wte.weight", "lm_head.weight", "both"])
def test_tied_tensors_are_found_under_either_name(stored: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        value = tensors.pop("transformer.wte.weight")
        names = ["transformer.wte.weight", "lm_head.weight"] if stored == "both" else [stored]
        tensors.update({name: value.clone() for name in names})

    expected = model_class("gpt2").from_pretrained(written("gpt2", tmp_path))
    edited(tmp_path, change)
    own, notes = loaded(gpt2, tmp_path)
    assert_like(own, expected)
    assert own.lm_head.weight is own.transformer.wte.weight
    assert not notes


def test_tied_tensors_of_different_values_are_refused(tmp_path: Path) -> None:
    edited(
        written("gpt2", tmp_path),
        lambda tensors: tensors.update({"lm_head.weight": tensors["transformer.wte.weight"] + 1}),
    )
    with refuses(CheckpointError, "tie_word_embeddings=False"):
        loaded(gpt2, tmp_path)
    untied = tiny_config("gpt2", tie_word_embeddings=False)
    own, _ = loaded(lambda: model_class("gpt2").from_config(untied), tmp_path)
    assert torch.equal(own.lm_head.weight, own.transformer.wte.weight + 1)


def test_wrong_shapes_are_refused_by_name(tmp_path: Path) -> None:
    written("gpt2", tmp_path)
    larger = tiny_config("gpt2")
    larger.n_positions = 12
    with refuses(CheckpointError, "transformer.wpe.weight", "(8, 16)", "(12, 16)"):
        loaded(lambda: model_class("gpt2").from_config(larger), tmp_path)
    own, notes = loaded(lambda: model_class("gpt2").from_config(larger), tmp_path, strict=False)
    assert own.transformer.wpe.weight.shape == (12, 16)
    says(notes[0], "transformer.wpe.weight", "(8, 16)", "(12, 16)")


def test_unknown_names_are_reported_with_the_closest_one(tmp_path: Path) -> None:
    edited(
        written("gpt2", tmp_path),
        lambda tensors: tensors.update({"transformer.ln_F.weight": tensors.pop("transformer.ln_f.weight")}),
    )
    own, notes = loaded(gpt2, tmp_path)
    assert "transformer.ln_f.weight: missing in the checkpoint" in notes[0]
    assert "did you mean 'transformer.ln_F.weight'?" in notes[0]
    assert torch.equal(own.transformer.ln_f.weight, torch.ones(16))


def test_old_names_are_those_of_transformers(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            tensors[old] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(8)[None]

    expected = model_class("bert").from_pretrained(written("bert", tmp_path))
    edited(tmp_path, change)
    own, notes = loaded(lambda: model_class("bert").from_config(tiny_config("bert")), tmp_path)
    assert_like(own, expected)
    assert not notes


def test_layouts_that_transformers_converts_are_refused(tmp_path: Path) -> None:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = MixtralConfig(num_hidden_layers=1, num_local_experts=2, vocab_size=61, **sizes)
    model = MixtralForCausalLM(config)
    model.save_pretrained(tmp_path / "old")
    with refuses(CheckpointError, "save_original_format=False"):
        loaded(lambda: MixtralForCausalLM(config), tmp_path / "old")
    model.save_pretrained(tmp_path / "new", save_original_format=False)
    own, _ = loaded(lambda: MixtralForCausalLM(config), tmp_path / "new")
    assert_like(own, model)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    written("bert", tmp_path)
    with refuses(CheckpointError, "GPT2LMHeadModel"):
        loaded(gpt2, tmp_path)


def test_values_are_cast_to_the_dtype_of_the_module(tmp_path: Path) -> None:
    expected = model_class("gpt2").from_pretrained(written("gpt2", tmp_path))
    build = lambda: model_class("gpt2").from_config(tiny_config("gpt2"), dtype=torch.bfloat16)  # noqa: E731
    own, _ = loaded(build, tmp_path)
    assert_like(own, expected.to(torch.bfloat16))
    edited(tmp_path, lambda tensors: tensors.update({"transformer.ln_f.bias": torch.zeros(16, dtype=torch.int8)}))
    with refuses(CheckpointError, "transformer.ln_f.bias", "torch.int8"):
        loaded(build, tmp_path)


def test_other_modules_must_match(tmp_path: Path) -> None:
    source = Regressor().net
    save_file(source.state_dict(), tmp_path / "net.safetensors")
    own, notes = loaded(lambda: Regressor().net, tmp_path / "net.safetensors", into="net")
    assert_like(own, source)
    assert not notes
    edited_tensors = source.state_dict()
    edited_tensors["more"] = torch.zeros(1)
    save_file(edited_tensors, tmp_path / "net.safetensors")
    with refuses(CheckpointError, "strict=False", "net.safetensors"):
        loaded(lambda: Regressor().net, tmp_path / "net.safetensors", into="net")
    _, notes = loaded(lambda: Regressor().net, tmp_path / "net.safetensors", into="net", strict=False)
    assert "more: unknown to the module" in notes[0]


class Scaled(nn.Module):
    """Has a buffer that no state contains."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.arange(4.0), persistent=False)


def test_buffers_that_no_file_holds_need_their_values(tmp_path: Path) -> None:
    given = Scaled()
    save_file(given.state_dict(), tmp_path / "given.safetensors")
    own, notes = loaded(Scaled, tmp_path / "given.safetensors", into="net")
    assert torch.equal(own.scale, given.scale)
    assert torch.equal(own.layer.weight, given.layer.weight)
    assert notes == []

    def build() -> nn.Module:
        with torch.device("meta"):
            return Scaled()

    with refuses(ConfigurationError, "net.scale"):
        loaded(build, tmp_path / "given.safetensors", into="net")


def test_exports_and_checkpoints_of_phalanx_are_read(tmp_path: Path) -> None:
    module = FineTuned("gpt2", written("gpt2", tmp_path / "given"))
    trainer = silent_trainer(max_steps=1)
    trainer.fit(module, loader())
    trainer.export(tmp_path / "all.safetensors")
    trainer.save_checkpoint(tmp_path / "saved")
    for path in (tmp_path / "all.safetensors", tmp_path / "saved"):
        own, notes = loaded(gpt2, path)
        assert_like(own, module.net)
        assert not notes


def test_layers_may_be_wrapped_after_the_request(tmp_path: Path) -> None:
    expected = model_class("gpt2").from_pretrained(written("gpt2", tmp_path))

    class Adapter(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.extra = layer, nn.Parameter(torch.zeros(3))

    class Wrapped(Loaded):
        def configure_model(self) -> None:
            super().configure_model()
            block = self.net.transformer.h[0]
            if not isinstance(block.mlp, Adapter):
                block.mlp = Adapter(block.mlp)

    module = Wrapped(gpt2, (tmp_path, {}))
    silent_trainer().predict(module, DataLoader(tokens()[:2]))  # type: ignore[arg-type]
    assert torch.equal(
        module.net.transformer.h[0].mlp.base_layer.c_fc.weight, expected.transformer.h[0].mlp.c_fc.weight
    )


def test_arguments_are_checked(tmp_path: Path) -> None:
    module = TrainModule()
    module.net = nn.Linear(1, 1)
    with refuses(UnknownNameError, "'net'"):
        module.load_pretrained(tmp_path, into="nett")
    with refuses(ConfigurationError, "path=3"):
        module.load_pretrained(3)  # type: ignore[arg-type]
    with refuses(ConfigurationError, "strict='yes'"):
        module.load_pretrained(tmp_path, strict="yes")  # type: ignore[arg-type]
    with refuses(ConfigurationError, "into=int"):
        module.load_pretrained(tmp_path, into=3)  # type: ignore[arg-type]
    with refuses(ConfigurationError, "pretrained=3"):
        silent_trainer(max_steps=1).fit(Regressor(), DataLoader(tokens()), pretrained=3)  # type: ignore[arg-type]
