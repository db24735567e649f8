"""Adapters of peft on models that are built on the meta device begin as peft begins them, or are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import WIDTH, llama, row_loader
from messages import refuses
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor, nn

from phalanx import TrainModule
from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.parallel.full_tensors import whole_tensors
from phalanx.framework.state.module_state import model_state


class Tuned(TrainModule):
    """A pretrained model that is built without data, with adapters."""

    def __init__(self, folder: Path, inside: bool) -> None:
        super().__init__()
        self.folder, self.inside = folder, inside
        self.net: nn.Module | None = None
        self.started: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        if self.net is None:
            with torch.device("meta"):
                self.net = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder))
            self.load_pretrained(self.folder)
            with torch.device("meta" if self.inside else "cpu"):
                self.net = get_peft_model(self.net, LoraConfig(r=3, target_modules=["q_proj", "v_proj"]))

    def on_train_start(self) -> None:
        whole = whole_tensors(model_state(self.trainer.strategy, self), self.fabric.world)
        self.started = {name: tensor.clone() for name, tensor in whole if "lora_" in name}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[misc]
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((one for one in self.parameters() if one.requires_grad), lr=0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    llama().save_pretrained(path)
    return path


def started(strategy: str, ranks: int, folder: Path, inside: bool = False) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = Tuned(folder, inside)
    silent_trainer(strategy=strategy, devices=ranks, max_steps=1).fit(module, row_loader(6, 6 // ranks))
    return module.started


def test_adapters_that_a_sharded_strategy_builds_with_data_begin_at_zero(folder: Path) -> None:
    for strategy in ("fsdp", "zero3"):
        found = run_on_ranks(2, started, strategy, 2, folder, timeout=120)[0]
        first = torch.cat([value.flatten() for name, value in found.items() if "lora_A" in name])
        assert len(first) == 2 * 2 * 3 * WIDTH
        # As nn.Linear: uniform up to 1 / sqrt(inputs).
        assert first.std().item() == pytest.approx(1 / math.sqrt(3 * WIDTH), rel=0.25)
        assert not any(value.any() for name, value in found.items() if "lora_B" in name)


@pytest.mark.parametrize("inside", [True, False])
def test_adapters_that_lost_their_values_are_refused(inside: bool, folder: Path) -> None:
    with refuses(ConfigurationError, "'default'", "layers.0.self_attn.q_proj", "without torch.device('meta')"):
        started("single", 1, folder, inside)


class Own(TrainModule):
    """A model of its own on the meta device, with adapters."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model

        with torch.device("meta"):
            net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        self.net: Any = get_peft_model(net, LoraConfig(r=2, target_modules=["0"]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD((one for one in self.parameters() if one.requires_grad), lr=0.1)


def refused_on_ranks(folder: Path) -> None:
    with refuses(ConfigurationError, "'default'", "layers.0.self_attn.q_proj", "without torch.device('meta')"):
        started("fsdp", 2, folder, True)
    # Layers of no library do not draw values for adapters.
    with refuses(ConfigurationError, "'default'", "without torch.device('meta')"):
        silent_trainer(strategy="fsdp", devices=2, max_steps=1).fit(Own(), row_loader(6, 3))


def test_all_ranks_refuse_them(folder: Path) -> None:
    run_on_ranks(2, refused_on_ranks, folder, timeout=120)
