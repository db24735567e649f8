"""Compiled blocks, CUDA graphs, activation checkpointing and channels_last: the same losses as without."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cuda_machine import needs_gpu
from cuda_plugin import Measured
from ranks import run_script

# The compiler leaves processes and threads behind, so each case has a process of its own.
SCRIPT = """
import json, sys, time
import torch
from emulated_fits import Classifier, batches, emulated_trainer
from torch import nn
from torch.utils.checkpoint import checkpoint

strategy, case, arguments = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

class Recomputing(Classifier):
    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss = nn.functional.cross_entropy(self.head(x), batch[1])
        self.kept.append(loss.detach().clone())
        return loss

class Convolutions(Classifier):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 1, 3, padding=1))
        if case == "channels_last":
            self.to(memory_format=torch.channels_last)
        else:
            self.to(memory_format=torch.contiguous_format)
        self.formats = set()

    def training_step(self, batch, batch_idx):
        images = batch[0].view(-1, 1, 4, 4)
        if case == "channels_last":
            images = images.to(memory_format=torch.channels_last)
        self.formats.add(self.blocks[0].weight.is_contiguous(memory_format=torch.channels_last))
        loss = nn.functional.cross_entropy(self.head(self.blocks(images).flatten(1)), batch[1])
        self.kept.append(loss.detach().clone())
        return loss

torch.manual_seed(3)
kinds = {"recompute": Recomputing, "channels_last": Convolutions, "contiguous": Convolutions}
module = kinds.get(case, Classifier)(**({"dropout": 0.1} if case == "recompute" or case == "dropout" else {}))
torch.manual_seed(4)
began = time.perf_counter()
emulated_trainer(1, strategy=strategy, max_steps=8, **arguments).fit(module, batches(10))
names = [name for name, _ in module.named_parameters()]
print("found", json.dumps({"losses": module.losses(), "seconds": time.perf_counter() - began, "names": names}))
"""


def run(strategy: str, case: str, **arguments: Any) -> dict[str, Any]:
    done = run_script(SCRIPT, strategy, case, json.dumps(arguments), is_new=True, device="cuda", timeout=180.0)
    line = next((line for line in done.stdout.splitlines() if line.startswith("found ")), None)
    assert line is not None, done.stdout
    found: dict[str, Any] = json.loads(line.removeprefix("found "))
    return found


COMPILED: list[tuple[str, Any]] = [
    *[(name, True) for name in ("single", "ddp", "fsdp")],
    ("single", {"blocks": False}),
    ("single", {"mode": "reduce-overhead"}),
]


@needs_gpu("code that is generated for them")
@pytest.mark.parametrize(
    ("strategy", "compiled"), [*COMPILED, pytest.param("zero2", True, marks=pytest.mark.deepspeed)]
)
@pytest.mark.timeout(400)
def test_compiled_code_computes_the_same(strategy: str, compiled: Any, measured: Measured) -> None:
    found, expected = run(strategy, "compiled", compile=compiled), run(strategy, "eager")
    measured(f"8 steps with compile={compiled}, {strategy}", found["seconds"], "s")
    measured(f"8 steps without compile, {strategy}", expected["seconds"], "s")
    assert found["names"] == expected["names"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.timeout(200)
def test_recomputed_activations_draw_the_same_dropout_masks(strategy: str) -> None:
    found, expected = run(strategy, "recompute"), run(strategy, "dropout")
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)


@pytest.mark.timeout(200)
def test_channels_last_computes_the_same() -> None:
    found, expected = run("single", "channels_last"), run("single", "contiguous")
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
