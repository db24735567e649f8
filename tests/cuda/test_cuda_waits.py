"""Steps in which the host does not wait for the device: CUDA itself reports each synchronizing call."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_machine import needs_gpu
from cuda_plugin import Measured
from emulated_fits import Classifier, Manual, batches, emulated_trainer
from emulated_steps import BARE, EVERYDAY, FIRST, LAST, WITHOUT_READING
from ranks import run_on_ranks
from torch import nn

from phalanx import Fabric
from phalanx.callbacks import ModelCheckpoint

pytestmark = needs_gpu("debug mode for synchronizations: tests/emulated_cuda/test_synchronizations.py counts them")
STEPS = LAST - FIRST
# How CUDA's profiler calls what makes the host wait, and the transfers that do.
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
PAGEABLE = "Pageable"


class Guard:
    """Sets the debug mode in the steps from ``FIRST`` to ``LAST``."""

    def __init__(self, mode: str, size: int = 1) -> None:
        self.mode, self.size, self.seen = mode, size, 0

    def __call__(self, module: Any, batch_idx: int) -> None:
        """Note that a micro-batch begins."""
        if self.seen == FIRST * self.size:
            torch.cuda.set_sync_debug_mode(self.mode)
        if self.seen == LAST * self.size:
            torch.cuda.set_sync_debug_mode("default")
        self.seen += 1


def refusing(strategy: str, arguments: dict[str, Any], is_manual: bool) -> int:
    """Fit while a synchronizing call is an error; return the number of micro-batches."""
    size = arguments.get("accumulate_grad_batches", 1)
    guard = Guard("error", size)
    module = (Manual if is_manual else Classifier)(at_step=guard)
    try:
        trainer = emulated_trainer(1, strategy=strategy, max_steps=LAST + 3, **arguments)
        trainer.fit(module, batches((LAST + 4) * size, pins=True))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return guard.seen


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "hsdp"])
@pytest.mark.parametrize("case", WITHOUT_READING)
def test_no_call_of_a_step_synchronizes(strategy: str, case: str) -> None:
    (seen,) = run_on_ranks(1, refusing, strategy, WITHOUT_READING[case], False, device="cuda")
    assert seen >= LAST + 3


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_no_call_of_a_manual_step_synchronizes(strategy: str) -> None:
    (seen,) = run_on_ranks(1, refusing, strategy, {}, True, device="cuda")
    assert seen >= LAST + 3


def warned(strategy: str, arguments: dict[str, Any], root: str, logs: bool) -> list[str]:
    """Return the place of each synchronizing call in the steps."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        module = Classifier(logs=logs, at_step=Guard("warn"))
        try:
            given = {"callbacks": [ModelCheckpoint(dirpath=root)], "default_root_dir": root} if logs else {}
            trainer = emulated_trainer(1, strategy=strategy, max_steps=LAST + 3, **given, **arguments)
            trainer.fit(module, batches(LAST + 4, pins=True))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{each.filename}:{each.lineno}" for each in found if "synchronizing CUDA" in str(each.message)]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_logging_synchronizes_only_where_metrics_are_published(
    strategy: str, tmp_path: Path, measured: Measured
) -> None:
    (places,) = run_on_ranks(1, warned, strategy, EVERYDAY, str(tmp_path), True, device="cuda")
    measured(f"synchronizing calls in {STEPS} everyday steps, {strategy}", len(places), "")
    # The progress bar reads its metrics by the clock, not by the step.
    others = [place for place in places if "progress_bar" not in place]
    assert len(others) <= STEPS // EVERYDAY["log_every_n_steps"] + 1, Counter(places)


@pytest.mark.parametrize(("case", "arguments"), [("fp16", {"precision": "16-mixed"}), ("skip", {"nonfinite": "skip"})])
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_checks_of_gradients_synchronize_once_in_a_step(
    strategy: str, case: str, arguments: dict[str, Any], tmp_path: Path, measured: Measured
) -> None:
    (places,) = run_on_ranks(1, warned, strategy, arguments, str(tmp_path), False, device="cuda")
    measured(f"synchronizing calls in a step, {case}, {strategy}", len(places) / STEPS, "")
    assert len(places) <= STEPS, Counter(places)


def fabric_steps(strategy: str) -> int:
    fabric = Fabric(accelerator="cuda", devices=1, strategy=strategy)
    fabric.launch()
    model = Classifier()
    network, optimizer = fabric.setup(
        nn.Sequential(model.blocks, model.head), torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    guard = Guard("error")
    try:
        for x, y in fabric.setup_dataloaders(batches(LAST + 3, pins=True)):
            guard(None, 0)
            fabric.backward(nn.functional.cross_entropy(network(x), y))
            fabric.clip_gradients(network, optimizer, max_norm=1.0, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return guard.seen


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_no_call_of_a_loop_of_the_users_own_synchronizes(strategy: str) -> None:
    assert run_on_ranks(1, fabric_steps, strategy, device="cuda") == [LAST + 3]


def profiled(strategy: str) -> dict[str, int]:
    """Return how often the profiler saw each call and transfer that makes the host wait."""
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    )

    def at_step(module: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            torch.cuda.synchronize()
            profiler.start()
        if batch_idx == LAST:
            profiler.stop()

    trainer = emulated_trainer(1, strategy=strategy, max_steps=LAST + 3)
    trainer.fit(Classifier(at_step=at_step), batches(LAST + 4, pins=True))
    names = Counter(event.name for event in profiler.events() or [])
    return {name: count for name, count in names.items() if name in WAITS or PAGEABLE in name}


@pytest.mark.parametrize(
    ("strategy", "most"),
    [
        *[(name, 0) for name in ("single", "ddp", "fsdp", "hsdp")],
        *[pytest.param(*case, marks=pytest.mark.deepspeed) for case in BARE.items()],
    ],
)
@pytest.mark.timeout(200)
def test_the_profiler_sees_no_further_waits(strategy: str, most: int, measured: Measured) -> None:
    (found,) = run_on_ranks(1, profiled, strategy, device="cuda", timeout=180.0)
    for name, count in found.items():
        measured(f"{name} in {STEPS} steps, {strategy}", count, "")
    # The profiler itself synchronizes the device as it starts and as it stops.
    waits = sum(found.get(name, 0) for name in ("cudaStreamSynchronize", "cudaDeviceSynchronize"))
    assert waits <= most * STEPS + 2, found
    if not most:
        assert [name for name in found if PAGEABLE in name] == [], found
