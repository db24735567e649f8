"""Adapters written during and after a fit, alone and merged, give the logits of the trained model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import Adapted, gpt2, llama, row_loader, rows
from messages import refuses
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Callback, hf
from phalanx.framework.core.errors import ConfigurationError, UnknownNameError
from phalanx.framework.core.optimizer_config import parameters_of

STRATEGIES = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 3, "zero3": 2}


class SaveAtEnd(Callback):
    """Writes the adapter and the merged model while the weights are still sharded."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_end(self, trainer: Any, module: Any) -> None:
        hf.save_adapter(trainer, self.directory / "adapter")
        hf.save_adapter(trainer, self.directory / "merged", merge=True)


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    logits: Tensor = model.eval()(input_ids=rows(4)).logits
    return logits


def trained(strategy: str, ranks: int, variant: str, directory: Path) -> tuple[Tensor, Tensor | None]:
    """Train and write; return logits of the trained model and of its own merge, on rank 0."""
    module = Adapted(variant)
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_steps=2, callbacks=[SaveAtEnd(directory)])
    trainer.fit(module, row_loader(2 * 12, 12 // ranks))
    if not trainer.is_global_zero:
        return torch.empty(0), None
    found = logits_of(module.net)
    hf.save_adapter(trainer, directory / "after")
    return found, logits_of(module.net.merge_and_unload())


def opened(directory: Path, variant: str) -> Any:
    from peft import PeftModel

    base = gpt2() if variant in ("conv1d", "bias") else llama()
    return PeftModel.from_pretrained(base, str(directory))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peft_and_transformers_open_what_was_written(strategy: str, tmp_path: Path) -> None:
    check(strategy, "modules_to_save", tmp_path)


@pytest.mark.parametrize("variant", ["conv1d", "bias", "dora", "two_adapters"])
def test_features_of_peft_are_exported(variant: str, tmp_path: Path) -> None:
    check("single", variant, tmp_path)


def check(strategy: str, variant: str, directory: Path) -> None:
    ranks = STRATEGIES[strategy]
    arguments = (strategy, ranks, variant, directory)
    results = [trained(*arguments)] if ranks == 1 else run_on_ranks(ranks, trained, *arguments, timeout=120.0)
    expected, merged = results[0]
    for written in ("adapter", "after"):
        torch.testing.assert_close(logits_of(opened(directory / written, variant)), expected, rtol=0.0, atol=1e-6)
    kind = type(gpt2() if variant in ("conv1d", "bias") else llama())
    found = kind.from_pretrained(str(directory / "merged"))
    assert merged is not None
    torch.testing.assert_close(logits_of(found), merged, rtol=0.0, atol=1e-6)
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)


def test_the_base_is_not_written(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    trained("single", 1, "linear", tmp_path)
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    module = Adapted("linear")
    (optimizer,) = [module.configure_optimizers()]
    assert sum(one.numel() for one in written.values()) == sum(one.numel() for one in parameters_of(optimizer))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "after", "merged"]


def test_an_adapter_of_a_tied_layer_is_written_and_not_merged(tmp_path: Path) -> None:
    module = Adapted("tied_embeddings")
    trainer = silent_trainer(devices=1, max_steps=1)
    trainer.fit(module, row_loader(12, 12))
    with refuses(ConfigurationError, "wte.base_layer.weight"):
        hf.save_adapter(trainer, tmp_path / "merged", merge=True)
    hf.save_adapter(trainer, tmp_path / "adapter")
    torch.testing.assert_close(logits_of(opened(tmp_path / "adapter", "conv1d")), logits_of(module.net))
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    plain = Regressor()
    trainer = silent_trainer(devices=1, max_steps=1)
    trainer.fit(plain, loader())
    with refuses(ConfigurationError, "save_adapter", "Regressor"):
        hf.save_adapter(trainer, tmp_path / "adapter")
    module = Adapted("linear")
    trainer.fit(module, row_loader(12, 12))
    with refuses(UnknownNameError, "adapter='defalt'", "'default'"):
        hf.save_adapter(trainer, tmp_path / "adapter", adapter="defalt")
    (tmp_path / "file").touch()
    with refuses(ConfigurationError, str(tmp_path / "file")):
        hf.save_adapter(trainer, tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_run_that_is_repeated_replaces_what_it_wrote(tmp_path: Path) -> None:
    for seed in (1, 2):
        torch.manual_seed(seed)
        trainer = fitted(Adapted("linear").net)
        for merge, folder in ((False, tmp_path / "adapter"), (True, tmp_path / "merged")):
            hf.save_adapter(trainer, folder, merge=merge)
            (folder / "tokenizer.json").write_text(str(seed))
            assert sorted(path.name for path in tmp_path.glob(".*")) == []
    expected = logits_of(trainer.module.net)
    torch.testing.assert_close(logits_of(opened(tmp_path / "adapter", "linear")), expected, rtol=0.0, atol=1e-6)
    found = type(llama()).from_pretrained(str(tmp_path / "merged"))
    torch.testing.assert_close(logits_of(found), expected, rtol=1e-4, atol=1e-5)
    # Transformers would add the adapter to the model that it is merged into.
    with refuses(ConfigurationError, "merge=False", "config.json"):
        hf.save_adapter(trainer, tmp_path / "merged")
    with refuses(ConfigurationError, "merge=True", "adapter_config.json"):
        hf.save_adapter(trainer, tmp_path / "adapter", merge=True)
    assert [(tmp_path / name / "tokenizer.json").read_text() for name in ("adapter", "merged")] == ["2", "2"]


def fitted(net: Any) -> Any:
    """Return a Trainer that has fitted a model with adapters."""
    module = Adapted("linear")
    module.net = net
    trainer = silent_trainer(devices=1, max_steps=1)
    trainer.fit(module, row_loader(12, 12))
    return trainer


@pytest.mark.parametrize("merge", [False, True])
def test_of_several_active_adapters_one_must_be_chosen(merge: bool, tmp_path: Path) -> None:
    net = Adapted("two_adapters").net
    net.base_model.set_adapter(["default", "other"])
    trainer = fitted(net)
    with refuses(ConfigurationError, "default, other", "adapter='default'"):
        hf.save_adapter(trainer, tmp_path / "out", merge=merge)
    assert not list(tmp_path.iterdir())
    hf.save_adapter(trainer, tmp_path / "out", adapter="other", merge=merge)


def resized(folder: Path) -> Any:
    """Return a Llama of a folder with a larger vocabulary than the folder has."""
    from transformers import LlamaForCausalLM

    base: Any = LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    base.resize_token_embeddings(base.config.vocab_size + 5)
    return base


def resized_and_written(strategy: str, ranks: int, folder: Path) -> Tensor:
    """Train the embeddings and an adapter, and write them in the run; return the logits on rank 0."""
    from peft import LoraConfig, get_peft_model

    module = Adapted("linear")
    module.net = get_peft_model(resized(folder / "base"), LoraConfig(r=2, target_modules=["q_proj"]))
    module.net.get_input_embeddings().weight.requires_grad = True
    module.net.get_output_embeddings().weight.requires_grad = True
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_steps=2, callbacks=[WriteAdapter(folder / "out")])
    trainer.fit(module, row_loader(12, 6 // ranks))
    return logits_of(module.net) if trainer.is_global_zero else torch.empty(0)


class WriteAdapter(Callback):
    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_end(self, trainer: Any, module: Any) -> None:
        hf.save_adapter(trainer, self.directory)


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2), ("zero3", 2)])
def test_embeddings_of_a_resized_vocabulary_are_written(strategy: str, ranks: int, tmp_path: Path) -> None:
    from peft import PeftModel

    llama().save_pretrained(tmp_path / "base")
    arguments = strategy, ranks, tmp_path
    results = [resized_and_written(*arguments)] if ranks == 1 else run_on_ranks(ranks, resized_and_written, *arguments)
    found = PeftModel.from_pretrained(resized(tmp_path / "base"), str(tmp_path / "out"))
    torch.testing.assert_close(logits_of(found), results[0], rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("name", ["some/model", "/no/such/folder", ""])
def test_the_base_is_looked_for_on_this_machine_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("peft.utils.other.file_exists", lambda repository, *_, **__: asked.append(repository))
    net = Adapted("linear").net
    net.peft_config["default"].base_model_name_or_path = name
    trainer = fitted(net)
    hf.save_adapter(trainer, tmp_path / "out")
    assert not asked
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"] == name


def test_what_peft_cannot_merge_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    net = get_peft_model(llama(), LoraConfig(r=2, target_modules=["q_proj"], lora_bias=True))
    trainer = fitted(net)
    with refuses(ConfigurationError, "merge=True", "'default'", varies="Impossible .*"):
        hf.save_adapter(trainer, tmp_path / "out", merge=True)
    assert not list(tmp_path.iterdir())
