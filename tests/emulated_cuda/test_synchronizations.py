"""How often the host waits for the device in an optimizer step, under every strategy: a breach shows each stack."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_recording import NATIVE, Entry, Recording, recorded
from emulated_fits import (
    BATCH_SIZE,
    CASES,
    DEEPSPEED_WAITS,
    EVERYDAY,
    FIRST,
    LAST,
    Classifier,
    Manual,
    batches,
    emulated_trainer,
)
from ranks import run_on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Fabric, seed_everything
from phalanx.callbacks import ModelCheckpoint

# Of these threads the step is made; those of a save may wait as long as they like.
_STEPPING = ("MainThread", NATIVE)


class Steps:
    """Divides the entries of a recording by the step they belong to."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._begins: list[int] = []

    def mark(self, module: Any = None, batch_idx: int = 0) -> None:
        """Note that a micro-batch begins."""
        self._begins.append(len(self._recording.entries))

    def of_each(self, size: int = 1) -> list[list[str]]:
        """Return what made the host wait in each of the later steps, which are of ``size`` micro-batches."""
        begins = self._begins[::size]
        parts = [self._recording.entries[a:b] for a, b in itertools.pairwise(begins)]
        return [_waits(part) for part in parts[FIRST:LAST]]


def _waits(entries: list[Entry]) -> list[str]:
    found: list[Entry] = []
    for entry in entries:
        # A blocking copy is a wait already, whatever memory it is from.
        is_noted = entry.kind == "pageable" and found and (found[-1].kind, found[-1].stack) == ("sync", entry.stack)
        if entry.thread in _STEPPING and not is_noted:
            found.append(entry)
    return [str(entry) for entry in found]


def waits_of(strategy: str, devices: int, cases: dict[str, dict[str, Any]], logs: bool) -> dict[str, list[list[str]]]:
    """Return what made the host wait in the steps of a fit of each case."""
    found = {}
    for name, arguments in cases.items():
        size = arguments.get("accumulate_grad_batches", 1)
        with recorded("sync", "event", "pageable") as recording, tempfile.TemporaryDirectory() as root:
            steps = Steps(recording)
            given = {"default_root_dir": root, "max_steps": LAST + 3, **arguments}
            if logs:
                given["callbacks"] = [ModelCheckpoint(dirpath=Path(root) / "saved")]
            trainer = emulated_trainer(devices, strategy=strategy, **given)
            trainer.fit(Classifier(logs=logs, at_step=steps.mark), batches((LAST + 4) * size * devices, pins=True))
            found[name] = steps.of_each(size)
    return found


def check(found: dict[str, list[list[str]]], most: int) -> None:
    for name, steps in found.items():
        assert len(steps) == LAST - FIRST, name
        for step, waits in enumerate(steps, FIRST):
            stacks = "\n".join(waits)
            assert len(waits) <= most, (
                f"{name}, step {step}: the host waited {len(waits)} times, at most {most}:\n{stacks}"
            )


def on_devices(strategy: str) -> int:
    return 1 if strategy == "single" else 2


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "hsdp"])
def test_no_step_waits_for_the_device(strategy: str) -> None:
    devices = on_devices(strategy)
    for found in run_on_ranks(devices, waits_of, strategy, devices, CASES, False, device="cuda"):
        check(found, 0)


@pytest.mark.parametrize(("strategy", "most"), DEEPSPEED_WAITS.items())
def test_deepspeed_waits_no_more_often_than_its_own_code_requires(strategy: str, most: int) -> None:
    for found in run_on_ranks(2, waits_of, strategy, 2, {"bare": {}}, False, device="cuda"):
        check(found, most)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_logging_and_checkpoints_wait_only_where_metrics_are_published(strategy: str) -> None:
    devices = on_devices(strategy)
    for found in run_on_ranks(devices, waits_of, strategy, devices, {"everyday": EVERYDAY}, True, device="cuda"):
        # The progress bar reads its metrics by the clock, not by the step.
        waits = [[each for each in step if "progress_bar" not in each] for step in found["everyday"]]
        stacks = "\n".join(each for step in waits for each in step)
        published = (LAST - FIRST) // EVERYDAY["log_every_n_steps"] + 1
        assert max(map(len, waits)) <= 1, stacks
        assert sum(map(len, waits)) <= published, stacks


def test_fp16_waits_once_for_its_check_of_gradients() -> None:
    cases = {"fp16": {"precision": "16-mixed"}}
    for strategy in ("single", "ddp", "fsdp"):
        devices = on_devices(strategy)
        for found in run_on_ranks(devices, waits_of, strategy, devices, cases, False, device="cuda"):
            check(found, 1)


def manual_waits(strategy: str, devices: int) -> dict[str, list[list[str]]]:
    with recorded("sync", "event", "pageable") as recording:
        steps = Steps(recording)
        trainer = emulated_trainer(devices, strategy=strategy, max_steps=LAST + 3)
        trainer.fit(Manual(at_step=steps.mark), batches((LAST + 4) * devices, pins=True))
        return {"manual": steps.of_each()}


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_manual_optimization_waits_no_more_than_automatic(strategy: str) -> None:
    devices = on_devices(strategy)
    for found in run_on_ranks(devices, manual_waits, strategy, devices, device="cuda"):
        check(found, 0)


def copies_of_batches(strategy: str, devices: int) -> list[list[str]]:
    rows = TensorDataset(*(torch.cat(parts) for parts in zip(*batches((LAST + 4) * devices), strict=True)))
    with recorded("sync", "pageable", "upload", "race") as recording:
        begins: list[int] = []
        trainer = emulated_trainer(devices, strategy=strategy, max_steps=LAST + 3)
        module = Classifier(at_step=lambda module, batch_idx: begins.append(len(recording.entries)))
        trainer.fit(module, DataLoader(rows, BATCH_SIZE, shuffle=True))
        kinds = [entry.kind for entry in recording.entries]
    return [kinds[a:b] for a, b in itertools.pairwise(begins)][FIRST:LAST]


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_batches_of_a_data_loader_are_copied_from_pinned_memory(strategy: str) -> None:
    devices = on_devices(strategy)
    for copies in run_on_ranks(devices, copies_of_batches, strategy, devices, device="cuda"):
        assert copies == [["upload", "upload"]] * (LAST - FIRST)


def fabric_waits(strategy: str, devices: int) -> dict[str, list[list[str]]]:
    found = {}
    for name in ("bare", "clipped"):
        fabric = Fabric(accelerator="cuda", devices=devices, strategy=strategy)
        fabric.launch()
        seed_everything(1)
        model = Classifier()
        network, optimizer = fabric.setup(
            nn.Sequential(model.blocks, model.head), torch.optim.AdamW(model.parameters(), lr=1e-2)
        )
        loader = fabric.setup_dataloaders(batches((LAST + 4) * devices, pins=True))
        with recorded("sync", "event", "pageable") as recording:
            steps = Steps(recording)
            for x, y in loader:
                steps.mark()
                fabric.backward(nn.functional.cross_entropy(network(x), y))
                if name == "clipped":
                    fabric.clip_gradients(network, optimizer, max_norm=1.0, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()
            found[name] = steps.of_each()
    return found


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_loop_of_the_users_own_waits_only_where_it_says_so(strategy: str) -> None:
    devices = on_devices(strategy)
    for found in run_on_ranks(devices, fabric_waits, strategy, devices, device="cuda"):
        check(found, 0)
