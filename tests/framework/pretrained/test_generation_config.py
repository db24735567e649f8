"""A fine-tuned model generates, and is written, with the generation config of the folder that it started from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import FineTuned, loader, model_class, written
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks

from phalanx import Fabric
from phalanx.framework.core.errors import CheckpointError, ConfigurationError
from phalanx.hf import TransformersModule

# Without do_sample, temperature is one of the contradictions that published folders have.
SETTINGS: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": [7, 9], "repetition_penalty": 1.5, "temperature": 0.5}
PROMPT = torch.tensor([[4, 5]])


def base(path: Path) -> Path:
    """Return a folder of transformers with ``SETTINGS``."""
    folder = written("gpt2", path)
    file = folder / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **SETTINGS}))
    return folder


def batches(ranks: int = 1) -> list[dict[str, Any]]:
    """Return the batches of ``loader`` as a data collator makes them."""
    return [{"input_ids": batch, "labels": batch} for batch in loader(ranks)]


def settings_in(folder: Path) -> dict[str, Any]:
    stored = json.loads((folder / "generation_config.json").read_text())
    return {name: stored.get(name) for name in SETTINGS}


def check(model: Any) -> None:
    """Check that a model generates with ``SETTINGS``."""
    assert {name: getattr(model.generation_config, name) for name in SETTINGS} == SETTINGS


def fitted(strategy: str, ranks: int, folder: Path) -> None:
    module = TransformersModule(folder / "base")
    trainer = silent_trainer(strategy=strategy, devices=ranks, max_steps=1)
    trainer.fit(module, batches(ranks))
    check(module.model)
    trainer.save_pretrained(folder / "out")


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("zero3", 2)])
def test_a_folder_is_fine_tuned_with_its_settings(strategy: str, ranks: int, tmp_path: Path) -> None:
    base(tmp_path / "base")
    if ranks == 1:
        fitted(strategy, ranks, tmp_path)
    else:
        run_on_ranks(ranks, fitted, strategy, ranks, tmp_path, timeout=120)
    assert settings_in(tmp_path / "out") == SETTINGS


def test_generate_returns_as_many_tokens_as_from_pretrained(tmp_path: Path) -> None:
    module = TransformersModule(base(tmp_path / "base"))
    silent_trainer(devices=1).validate(module, batches(), verbose=False)
    expected = model_class("gpt2").from_pretrained(tmp_path / "base").generate(PROMPT)
    assert torch.equal(module.generate(PROMPT), expected)


def test_a_checkpoint_holds_the_settings(tmp_path: Path) -> None:
    model = model_class("gpt2").from_pretrained(base(tmp_path / "base"))
    for number, module in enumerate((TransformersModule(tmp_path / "base"), TransformersModule(model))):
        trainer = silent_trainer(devices=1, max_steps=1)
        trainer.fit(module, batches())
        trainer.save_checkpoint(tmp_path / f"saved-{number}")
    shutil.rmtree(tmp_path / "base")
    for number in range(2):
        found = TransformersModule.load_from_checkpoint(tmp_path / f"saved-{number}")
        check(found.model)
        trainer = silent_trainer(devices=1)
        trainer.validate(found, batches(), verbose=False)
        assert settings_in(trainer.save_pretrained(tmp_path / "out")) == SETTINGS


def test_a_module_that_asks_for_the_weights_gets_the_settings(tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    trainer = silent_trainer(devices=1, max_steps=1)
    trainer.fit(FineTuned("gpt2", folder), loader())
    assert settings_in(trainer.save_pretrained(tmp_path / "out")) == SETTINGS
    trainer.save_checkpoint(tmp_path / "saved")
    resumed, given = FineTuned("gpt2", folder), FineTuned("gpt2", None)
    silent_trainer(devices=1, max_steps=2).fit(resumed, loader(), ckpt_path=tmp_path / "saved")
    check(resumed.net)
    silent_trainer(devices=1, max_steps=1).fit(given, loader(), pretrained=folder)
    check(given.net)


class Changed(FineTuned):
    """Generates with a setting of its own."""

    def configure_model(self) -> None:
        super().configure_model()
        self.net.generation_config.max_new_tokens = 2


def test_what_a_module_sets_afterwards_stays(tmp_path: Path) -> None:
    module = Changed("gpt2", base(tmp_path / "base"))
    trainer = silent_trainer(devices=1, max_steps=1)
    trainer.fit(module, loader())
    assert module.net.generation_config.max_new_tokens == 2
    with refuses(ConfigurationError, "GPT2LMHeadModel", "temperature", varies="(?s)GenerationConfig .*"):
        trainer.save_pretrained(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_a_fabric_loads_the_settings(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    model = model_class("gpt2").from_pretrained(written("gpt2", tmp_path / "other"))
    prepared = fabric.setup(model)
    fabric.load_pretrained(prepared, base(tmp_path / "base"))
    check(model)


def test_older_folders_have_the_settings_in_their_config(tmp_path: Path) -> None:
    folder = written("gpt2", tmp_path / "base")
    (folder / "generation_config.json").unlink()
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_new_tokens": 3}))
    module = TransformersModule(folder)
    module.configure_model()
    assert module.model.generation_config.max_new_tokens == 3
    assert TransformersModule(dict(module.hparams)["model"])._generation.max_new_tokens == 3


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    folder = base(tmp_path / "base")
    (folder / "generation_config.json").write_text("{")
    with refuses(CheckpointError, "generation_config.json", varies="(?<=be read: ).*"):
        TransformersModule(folder)
