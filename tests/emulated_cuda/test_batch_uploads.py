"""Batches on their way to emulated devices: pinned memory, a stream of their own, and who waits for it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cuda_recording import recorded
from emulated_fits import BATCH_SIZE, Classifier, batches, emulated_trainer
from emulated_steps import FIRST, LAST, STEPS, on_devices
from ranks import run_on_ranks
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Fabric


def copies_of_batches(strategy: str, devices: int, window: int) -> list[list[str]]:
    rows = TensorDataset(*(torch.cat(parts) for parts in zip(*batches((STEPS + 1) * devices), strict=True)))
    with recorded("sync", "event", "pageable", "upload", "race") as recording:
        begins: list[int] = []
        trainer = emulated_trainer(devices, strategy=strategy, max_epochs=1, accumulate_grad_batches=window)
        module = Classifier(at_step=lambda module, batch_idx: begins.append(len(recording.entries)))
        trainer.fit(module, DataLoader(rows, BATCH_SIZE, shuffle=True))
        kinds = [entry.kind for entry in recording.entries]
    return [kinds[a:b] for a, b in itertools.pairwise(begins)][FIRST:LAST]


@pytest.mark.parametrize(("strategy", "window"), [("single", 1), ("ddp", 1), ("single", 3), ("ddp", 3)])
def test_batches_of_a_data_loader_are_copied_before_the_host_waits(strategy: str, window: int) -> None:
    devices = on_devices(strategy)
    for copies in run_on_ranks(devices, copies_of_batches, strategy, devices, window, device="cuda"):
        assert copies == [["upload", "upload"]] * (LAST - FIRST)


def uploads(strategy: str, devices: int, loops: str) -> tuple[list[tuple[int, int]], list[int], list[str]]:
    """Train four steps, in each of which the batch on the host is overwritten once the computing stream has caught up.

    Returns:
        for each step the numbers of uploads before it and of rows of batches so far; the streams of the uploads; what
        was overwritten too early.
    """
    rows = batches(4 * devices, pins=True)
    with recorded("upload", "race") as recording:
        counts: list[tuple[int, int]] = []

        def step(module: Any, batch_idx: int) -> None:
            counts.append((len(recording.of("upload")), 2 * (batch_idx + 1)))
            # Waits for uploads only if the computations do.
            torch.cuda.current_stream().synchronize()
            x, _ = rows[batch_idx * devices + (torch.distributed.get_rank() if devices > 1 else 0)]
            x.fill_(3.0)

        if loops == "trainer":
            emulated_trainer(devices, strategy=strategy, max_steps=4).fit(Classifier(at_step=step), rows)
        else:
            fabric = Fabric(accelerator="cuda", devices=devices, strategy=strategy)
            fabric.launch()
            for batch_idx, _ in enumerate(fabric.setup_dataloaders(rows)):
                step(None, batch_idx)
        torch.cuda.synchronize()
    return counts, [entry.stream for entry in recording.of("upload")], [str(entry) for entry in recording.of("race")]


@pytest.mark.parametrize("loops", ["trainer", "fabric"])
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_batch_is_copied_on_a_stream_that_only_its_own_computations_wait_for(strategy: str, loops: str) -> None:
    devices = on_devices(strategy)
    for counts, streams, races in run_on_ranks(devices, uploads, strategy, devices, loops, device="cuda"):
        assert all(uploaded >= needed for uploaded, needed in counts)
        assert len(counts) == 4
        # Stream 0 is that of the computations.
        assert len(set(streams)) == 1
        assert 0 not in streams
        assert races == []
