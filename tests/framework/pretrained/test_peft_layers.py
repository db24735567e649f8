"""A model with adapters of peft is not written as a folder, in which transformers would not find their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import llama, row_loader
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import Fabric, TrainModule
from phalanx.framework.core.errors import ConfigurationError


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["q_proj"])


def wrapped() -> Any:
    from peft import get_peft_model

    return get_peft_model(llama(), lora())


def added() -> Any:
    model = llama()
    model.add_adapter(lora())
    return model


def prompted() -> Any:
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(llama(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


class Tuned(TrainModule):
    """Trains the weights of ``net`` that require gradients."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((one for one in self.parameters() if one.requires_grad), lr=0.1)


def refused(build: Callable[[], nn.Module], strategy: str, ranks: int, folder: Path) -> None:
    module = Tuned(build())
    trainer = silent_trainer(devices=ranks, strategy=strategy, max_steps=1)
    trainer.fit(module, row_loader(6, 6 // ranks))
    for given in (None, module.net):
        with refuses(ConfigurationError, "save_pretrained", "phalanx.hf.save_adapter"):
            trainer.save_pretrained(folder / "out", model=given)


@pytest.mark.parametrize("build", [wrapped, added, prompted])
def test_a_trainer_refuses_before_it_writes(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    refused(build, "single", 1, tmp_path)
    assert not list(tmp_path.iterdir())


def test_all_ranks_refuse(tmp_path: Path) -> None:
    run_on_ranks(2, refused, wrapped, "fsdp", 2, tmp_path, timeout=120)
    assert not list(tmp_path.iterdir())


def test_a_fabric_refuses(tmp_path: Path) -> None:
    model = wrapped()
    fabric = Fabric(accelerator="cpu", devices=1)
    prepared = fabric.setup(model)
    for given in (prepared, model):
        with refuses(ConfigurationError, "save_pretrained", "phalanx.hf.save_adapter"):
            fabric.save_pretrained(given, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_merged_model_and_one_next_to_adapters_are_written(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    model = wrapped()
    both = nn.ModuleDict({"adapted": model, "plain": llama()})
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.setup(both)
    fabric.save_pretrained(both["plain"], tmp_path / "plain")
    merged = model.merge_and_unload()
    fabric.save_pretrained(merged, tmp_path / "merged")
    tokens = torch.arange(6)[None]
    for name, expected in (("plain", both["plain"]), ("merged", merged)):
        found: Any = LlamaForCausalLM.from_pretrained(tmp_path / name)
        torch.testing.assert_close(found(tokens).logits, expected(tokens).logits)
