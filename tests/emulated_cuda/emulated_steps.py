"""Count the times that the host waits for the device in each optimizer step of a fit or a loop."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda_recording import NATIVE, Entry, Recording, recorded
from emulated_fits import Classifier, batches, emulated_trainer

from phalanx.callbacks import ModelCheckpoint

# The first steps allocate state and arrange buckets, and some of fp16 are skipped.
FIRST, LAST = 5, 10
STEPS = LAST + 2
STRATEGIES = ["single", "ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"]
# What is left under these is in DeepSpeed's own code: a copy of the number -1 to the device, and the result of its
# check of the norm. Stage 3 also waits for the device after its update.
BARE = {"zero1": 2, "zero2": 2, "zero3": 3}
# Settings whose steps read nothing from the device, unless the strategy itself does.
WITHOUT_READING: dict[str, dict[str, Any]] = {
    "bare": {},
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16": {"precision": "bf16-mixed"},
    "clipped bf16": {"precision": "bf16-true", "gradient_clip_val": 0.1},
}
EVERYDAY: dict[str, Any] = {
    "logger": "csv",
    "enable_progress_bar": True,
    "enable_checkpointing": True,
    "log_every_n_steps": 5,
}
# Of these threads the step is made; those of a save may wait as long as they like.
_STEPPING = ("MainThread", NATIVE)

Waits = list[list[str]]
"""For each of the later steps, the stack of each time that the host waited."""


class Steps:
    """Divides the entries of a recording by the step they belong to."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._begins: list[int] = []

    def mark(self, module: Any = None, batch_idx: int = 0) -> None:
        """Note that a micro-batch begins."""
        self._begins.append(len(self._recording.entries))

    def of_each(self, size: int = 1) -> Waits:
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


def on_devices(strategy: str) -> int:
    """Return the number of devices that a strategy is tested on."""
    return 1 if strategy == "single" else 2


def waits_of_fit(
    strategy: Any,
    devices: int,
    arguments: dict[str, Any],
    module: Callable[..., Classifier] = Classifier,
    validates: bool = False,
    **options: Any,
) -> Waits:
    """Return what made the host wait in the steps of a fit with these arguments of a Trainer.

    Args:
        strategy: that of the Trainer.
        devices: the number of devices.
        arguments: others of the Trainer.
        module: makes the module, which is given ``options`` and what to call in each step.
        validates: whether there are batches for validation.
        options: see ``module``.
    """
    size = arguments.get("accumulate_grad_batches", 1)
    with recorded("sync", "event", "pageable") as recording, tempfile.TemporaryDirectory() as root:
        steps = Steps(recording)
        given = {"default_root_dir": root, "max_steps": STEPS, **arguments}
        if given.get("enable_checkpointing"):
            given["callbacks"] = [*given.get("callbacks", []), ModelCheckpoint(dirpath=Path(root) / "saved")]
        trainer = emulated_trainer(devices, strategy=strategy, **given)
        validation = [batches(2 * devices, pins=True)] if validates else []
        train = batches((STEPS + 1) * size * devices, pins=True)
        trainer.fit(module(at_step=steps.mark, **options), train, *validation)
        return steps.of_each(size)


def check(name: str, found: Waits, expected: list[int]) -> None:
    """Compare how often the host waited in each of the later steps; a difference shows each stack."""
    assert len(found) == LAST - FIRST, name
    for step, (waits, count) in enumerate(zip(found, expected, strict=True), FIRST):
        stacks = "\n".join(waits)
        assert len(waits) == count, f"{name}, step {step}: the host waited {len(waits)} times, not {count}:\n{stacks}"


def check_each(name: str, found: Waits, expected: int) -> None:
    """Compare how often the host waited in each of the later steps with one number."""
    check(name, found, [expected] * (LAST - FIRST))
