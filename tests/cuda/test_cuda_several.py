"""Several devices with NCCL between them: failures, stalls, determinism, and meshes. Uneven data also on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cuda_machine import EMULATED, needs_devices, needs_gpu
from cuda_plugin import Measured
from emulated_fits import Classifier, batches, trained, whole_weights
from models import silent_trainer
from ranks import run_on_ranks, run_script
from torch import Tensor

FAILING = """
import sys, time
from emulated_fits import Classifier, batches, emulated_trainer, rank_of

kind, strategy = sys.argv[1:]

def at_step(module, batch_idx):
    if batch_idx == 3 and rank_of() == 1:
        print("at step 3", flush=True)
        if kind == "fails":
            raise ValueError("a planned failure")
        time.sleep(300)

if __name__ == "__main__":
    stall_timeout = False if kind == "fails" else 5.0
    trainer = emulated_trainer(2, strategy=strategy, max_steps=8, stall_timeout=stall_timeout)
    trainer.fit(Classifier(at_step=at_step), batches(20))
"""


def uneven(strategy: str, accelerator: str) -> tuple[list[float], dict[str, Tensor], int]:
    """Train on 7 micro-batches and 2 ranks: one is without data in the last step."""
    module = Classifier(optimizer="sgd")
    trainer = silent_trainer(accelerator=accelerator, devices=2, strategy=strategy, max_epochs=2, stall_timeout=False)
    trainer.fit(module, batches(7))
    return module.losses(), whole_weights(module), trainer.global_step


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_uneven_data_trains_as_on_the_cpu(strategy: str) -> None:
    on_cpu, on_cuda = (run_on_ranks(2, uneven, strategy, each, device=each) for each in ("cpu", "cuda"))
    tolerance = 1e-6 if EMULATED else 1e-4
    for (expected, expected_weights, steps), (losses, weights, found) in zip(on_cpu, on_cuda, strict=True):
        assert found == steps == 8
        assert losses == pytest.approx(expected, rel=tolerance)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=tolerance, atol=tolerance)


@needs_devices(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(("kind", "code"), [("fails", 1), ("stalls", 76)])
@pytest.mark.timeout(150)
def test_a_rank_that_fails_or_stalls_is_named_while_others_wait_for_it(kind: str, code: int, strategy: str) -> None:
    done = run_script(FAILING, kind, strategy, is_new=True, device="cuda", timeout=120.0)
    assert done.returncode == code, done.stdout
    assert ("a planned failure" in done.stdout) == (kind == "fails"), done.stdout
    assert "rank 1" in done.stdout.lower(), done.stdout


def twice(strategy: str, root: str, arguments: dict[str, Any]) -> bool:
    """Whether two runs with the same seed have the same weights."""
    one, other = (trained(strategy, 2, f"{root}/{number}", 6, None, **arguments) for number in (1, 2))
    return all(torch.equal(weight, other[name]) for name, weight in one.items())


@needs_devices(2)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_deterministic_runs_are_the_same(strategy: str, tmp_path: Any, measured: Measured) -> None:
    results = run_on_ranks(2, twice, strategy, str(tmp_path), {"deterministic": True}, device="cuda")
    measured(f"deterministic runs on 2 ranks are the same, {strategy}", float(all(results)), "")
    assert all(results)


def on_eight(strategy: str, accelerator: str) -> tuple[list[float], dict[str, Tensor]]:
    module = Classifier(optimizer="sgd")
    trainer = silent_trainer(accelerator=accelerator, devices=8, strategy=strategy, max_steps=4)
    trainer.fit(module, batches(40))
    return module.losses(), whole_weights(module)


@needs_gpu("more than two devices")
@needs_devices(8)
@pytest.mark.parametrize(
    "strategy",
    ["ddp", "fsdp", "hsdp", *[pytest.param(each, marks=pytest.mark.deepspeed) for each in ("zero2", "zero3")]],
)
@pytest.mark.timeout(300)
def test_eight_devices_train_as_one_device_does(strategy: str) -> None:
    found = run_on_ranks(8, on_eight, strategy, "cuda", device="cuda", timeout=240.0)
    expected = run_on_ranks(8, on_eight, "ddp", "cpu", timeout=240.0)
    for (losses, weights), (wanted, wanted_weights) in zip(found, expected, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-3)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, wanted_weights[name], rtol=1e-3, atol=1e-4)
