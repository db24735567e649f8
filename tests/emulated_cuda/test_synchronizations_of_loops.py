"""How often the host waits for the device in a loop of the user's own, with a Fabric."""

from __future__ import annotations

import pytest
import torch
from cuda_recording import recorded
from emulated_fits import Classifier, batches
from emulated_steps import BARE, STEPS, STRATEGIES, Steps, Waits, check_each, on_devices
from ranks import run_on_ranks
from torch import nn

from phalanx import Fabric, seed_everything


def waits_of_loop(strategy: str, devices: int, clips: bool) -> Waits:
    fabric = Fabric(accelerator="cuda", devices=devices, strategy=strategy)
    fabric.launch()
    seed_everything(1)
    model = Classifier()
    network, optimizer = fabric.setup(
        nn.Sequential(model.blocks, model.head), torch.optim.AdamW(model.parameters(), lr=1e-2)
    )
    loader = fabric.setup_dataloaders(batches((STEPS + 1) * devices, pins=True))
    with recorded("sync", "event", "pageable") as recording:
        steps = Steps(recording)
        for x, y in loader:
            steps.mark()
            fabric.backward(nn.functional.cross_entropy(network(x), y))
            if clips:
                fabric.clip_gradients(network, optimizer, max_norm=0.1, error_if_nonfinite=False)
            optimizer.step()
            optimizer.zero_grad()
        found = steps.of_each()
    fabric.free_memory()
    return found


def bare_and_clipped(strategy: str, devices: int) -> dict[str, Waits]:
    return {name: waits_of_loop(strategy, devices, name == "clipped") for name in ("bare", "clipped")}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loop_waits_as_often_as_a_trainer(strategy: str) -> None:
    devices = on_devices(strategy)
    for found in run_on_ranks(devices, bare_and_clipped, strategy, devices, device="cuda"):
        for name, waits in found.items():
            check_each(f"{strategy}, {name}", waits, BARE.get(strategy, 0))
