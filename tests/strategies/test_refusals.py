"""What a strategy cannot take is refused with a sentence that names it, and not by torch in the first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses, says
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import nn

from phalanx.framework.core.errors import ConfigurationError, UnknownNameError
from phalanx.strategies import DeepSpeedStrategy, FSDPStrategy
from phalanx.strategies.deepspeed.arguments import is_in_memory


class Sparse(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)


class Late(Sparse):
    """Makes its sparse layer where no process has started yet to look at it."""

    def __init__(self) -> None:
        super().__init__()
        del self.words

    def configure_model(self) -> None:
        self.words = nn.Embedding(10, 3, sparse=True)


class WholeTensors(Regressor):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


class Orthogonal(Regressor):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([each for each in self.parameters() if each.ndim == 2])


class Unused(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


class Hollow(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.hollow = nn.Linear(2, 2, device="meta")


def refusal(module: type[Regressor], strategy: str) -> str:
    """Return the sentence with which ranks refuse to train a module."""
    with pytest.raises(ConfigurationError) as caught:
        silent_trainer(strategy=strategy, devices=2, max_steps=3).fit(module(), loader(batch_size=2))
    return str(caught.value)


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_sparse_gradients_are_refused_before_a_process_starts(strategy: str) -> None:
    says(refusal(Sparse, strategy), "words", "Embedding(sparse=True)")


@pytest.mark.parametrize(
    ("module", "strategy", "names"),
    [
        (Late, "fsdp", ["words", "strategy='fsdp'"]),
        (Late, "zero2", ["words", "strategy='zero2'"]),
        (WholeTensors, "zero1", ["Adafactor", "ZeRO stage 1"]),
        (Orthogonal, "zero2", ["Muon", "ZeRO stage 2"]),
        (Unused, "ddp", ["idle.weight, idle.bias", "strategy='ddp_find_unused_parameters_true'"]),
        (Hollow, "zero3", ["hollow.weight"]),
    ],
    ids=["late fsdp", "late zero2", "whole tensors", "muon zero2", "unused", "hollow"],
)
def test_ranks_say_what_they_cannot_take(module: type[Regressor], strategy: str, names: list[str]) -> None:
    says(run_on_ranks(2, refusal, module, strategy), *names)


@pytest.mark.parametrize(("name", "meant"), [("ZeRO-3", "zero3"), ("zero_2_offload", "zero2-offload")])
def test_a_name_spelt_otherwise_is_recognised(name: str, meant: str) -> None:
    with refuses(UnknownNameError, f"'{meant}'"):
        silent_trainer(strategy=name)


def test_names_of_other_frameworks_are_aliases() -> None:
    offloaded = silent_trainer(strategy="fsdp_cpu_offload", devices=2).strategy
    assert isinstance(offloaded, FSDPStrategy)
    assert offloaded.cpu_offload
    assert silent_trainer(strategy="full_shard", devices=2).strategy.name == "fsdp"


def test_an_argument_of_lightnings_is_answered_with_what_takes_its_place() -> None:
    with refuses(ConfigurationError, "logging_batch_size_per_gpu=4"):
        DeepSpeedStrategy(logging_batch_size_per_gpu=4)  # type: ignore[call-arg]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no file system in memory at a known place")
def test_a_folder_in_memory_is_recognised() -> None:
    assert is_in_memory(Path("/dev/shm/swap"))
    assert not is_in_memory(Path("/proc"))
