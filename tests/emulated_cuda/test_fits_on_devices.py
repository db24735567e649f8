"""Fits on devices: the numbers of the CPU, resumed runs, saves, random states, and which devices are used.

The devices are emulated ones; ``make cuda`` runs these tests on those of the machine.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from cuda_machine import EMULATED, needs_devices, needs_emulation, shares_device
from cuda_recording import recorded
from emulated_fits import (
    Classifier,
    SaveAt,
    assert_same_checkpoints,
    batches,
    emulated_trainer,
    trained,
    whole_and_resumed,
    whole_weights,
)
from models import silent_trainer
from ranks import run_on_ranks
from torch import Tensor

from phalanx import seed_everything
from phalanx.framework.parallel import full_tensors

# Relative; other kernels than those of the CPU sum in another order.
TOLERANCE = 1e-6 if EMULATED else 1e-4


def on_devices(strategy: str) -> int:
    if strategy.startswith("zero") and shares_device(2):
        pytest.skip("DeepSpeed needs NCCL, which refuses two ranks on one device")
    return 1 if strategy == "single" else 2


# ---- numbers ---------------------------------------------------------------------------------------------------------


def numbers(strategy: str, devices: int, accelerator: str) -> tuple[list[float], dict[str, Tensor]]:
    # Of Adam, DeepSpeed has kernels of its own for the CPU. It also magnifies the rounding of a very small gradient.
    module = Classifier(optimizer="adamw" if EMULATED and not strategy.startswith("zero") else "sgd")
    trainer = silent_trainer(accelerator=accelerator, devices=devices, strategy=strategy, max_steps=4)
    trainer.fit(module, batches(12))
    return module.losses(), whole_weights(module)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "hsdp", "fsdp-offload", "zero2", "zero3"])
def test_the_numbers_are_those_of_the_cpu(strategy: str) -> None:
    devices = on_devices(strategy)
    on_cpu, on_cuda = (
        run_on_ranks(devices, numbers, strategy, devices, accelerator, device=accelerator)
        for accelerator in ("cpu", "cuda")
    )
    for (expected, expected_weights), (losses, weights) in zip(on_cpu, on_cuda, strict=True):
        assert losses == pytest.approx(expected, rel=TOLERANCE)
        assert weights.keys() == expected_weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=TOLERANCE, atol=TOLERANCE / 10)


def two_fits(strategy: str, is_small: bool) -> tuple[set[str], list[float], dict[str, Tensor]]:
    with pytest.MonkeyPatch.context() as patch:
        if is_small:
            patch.setattr(full_tensors, "free_memory", lambda device: 64)
        module = Classifier(optimizer="sgd")
        emulated_trainer(2, strategy=strategy, max_steps=2).fit(module, batches(4))
        places = {each.device.type for each in (*module.parameters(), *module.buffers())}
        emulated_trainer(2, strategy=strategy, max_steps=2).fit(module, batches(4))
    return places, module.losses(), whole_weights(module)


@pytest.mark.parametrize("strategy", ["fsdp", "zero3"])
def test_weights_that_no_device_can_hold_are_on_the_cpu_after_a_fit(strategy: str) -> None:
    on_devices(strategy)
    ranks, others = (run_on_ranks(2, two_fits, strategy, is_small, device="cuda") for is_small in (False, True))
    assert (ranks[0][0], others[0][0]) == ({"cuda"}, {"cpu"})
    for (_, losses, weights), (_, other_losses, other_weights) in zip(ranks, others, strict=True):
        assert losses == other_losses
        assert weights.keys() == other_weights.keys()
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


# ---- random states and resumed runs ----------------------------------------------------------------------------------


def masks() -> tuple[list[int], list[int]]:
    states: list[tuple[list[int], list[int]]] = []

    def note(module: Classifier, batch_idx: int) -> None:
        states.append((torch.cuda.get_rng_state(module.device).tolist(), torch.get_rng_state().tolist()))

    emulated_trainer(2, strategy="ddp", max_steps=1).fit(Classifier(dropout=0.5, at_step=note), batches(4))
    return states[0]


def test_the_ranks_draw_different_dropout_masks() -> None:
    (first, first_host), (second, second_host) = run_on_ranks(2, masks, device="cuda")
    assert first_host != second_host
    assert first != second


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "fsdp-offload", "zero2"])
def test_a_resumed_run_is_the_run_that_never_stopped(strategy: str, tmp_path: Path) -> None:
    devices = on_devices(strategy)
    results = run_on_ranks(devices, whole_and_resumed, strategy, devices, str(tmp_path), {}, device="cuda")
    whole, resumed = results[0]
    assert whole
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def resumed_on_another(root: str) -> tuple[dict[str, Tensor], dict[str, Tensor], bool]:
    whole = trained("single", [0], f"{root}/whole", 6, None)
    trained("single", [0], f"{root}/first", 3, None)
    # As the next line of ``trained`` leaves it.
    seed_everything(5)
    foreign = torch.cuda.get_rng_state(0)
    resumed = trained("single", [1], f"{root}/second", 6, f"{root}/first/step=3.ckpt")
    return whole, resumed, torch.equal(foreign, torch.cuda.get_rng_state(0))


@needs_devices(2)
def test_a_run_resumed_on_another_device_gets_the_random_state_of_the_first(tmp_path: Path) -> None:
    ((whole, resumed, is_untouched),) = run_on_ranks(1, resumed_on_another, str(tmp_path), device="cuda")
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())
    assert is_untouched


# ---- saves -----------------------------------------------------------------------------------------------------------


def saved_both_ways(strategy: str, devices: int, root: str) -> list[str]:
    """Save the same steps on a thread and at once; return what went wrong with pinned memory."""
    with recorded("race") as recording:
        for way in ("asynchronous", "at_once"):
            callback = SaveAt(f"{root}/{way}", way == "asynchronous")
            trainer = emulated_trainer(
                devices, strategy=strategy, max_steps=9, callbacks=[callback], enable_checkpointing=None
            )
            trainer.fit(Classifier(), batches(20))
    return [str(entry) for entry in recording.entries]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero2"])
def test_a_save_on_a_thread_holds_what_a_save_at_once_holds(strategy: str, tmp_path: Path) -> None:
    devices = on_devices(strategy)
    races = run_on_ranks(devices, saved_both_ways, strategy, devices, str(tmp_path), device="cuda")
    assert races == [[]] * devices
    for step in (3, 6, 9):
        assert_same_checkpoints(*(tmp_path / way / f"step={step}.ckpt" for way in ("asynchronous", "at_once")))


# ---- devices ---------------------------------------------------------------------------------------------------------


def devices_used(asks_for_plan: bool, root: str) -> list[tuple[str, int, tuple[str, ...]]]:
    # What an earlier test has left in reference cycles, such as pinned memory, is released on that test's device.
    gc.collect()
    with recorded("device") as recording:
        trainer = emulated_trainer(
            [1],
            max_steps=6,
            callbacks=[SaveAt(root)],
            default_root_dir=root,
            enable_checkpointing=None,
            log_every_n_steps=2,
        )
        if asks_for_plan:
            trainer.plan(Classifier(), batches(4))
        else:
            trainer.fit(Classifier(dropout=0.1, logs=True), batches(8))
    return [(entry.thread, entry.device, entry.stack) for entry in recording.entries]


@needs_devices(2)
@needs_emulation("report which device a thread uses")
@pytest.mark.parametrize("asks_for_plan", [False, True])
def test_only_the_chosen_device_is_used_by_any_thread(asks_for_plan: bool, tmp_path: Path) -> None:
    (used,) = run_on_ranks(1, devices_used, asks_for_plan, str(tmp_path), device="cuda")
    assert used
    assert [entry for entry in used if entry[1] != 1] == []
