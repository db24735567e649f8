"""Loops that continue from snapshots in memory after their ranks were killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from launched_nodes import outcome, several_nodes
from launches import Attempts
from messages import refuses
from ranks import run_script
from small_fits import Tiny
from torch import nn

from phalanx import Fabric
from phalanx.framework.core.errors import ConfigurationError

# With 0 ranks it runs on those of a launcher, which is what is killed: the node of the rank is lost.
LOOP = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from phalanx import Fabric

strategy, ranks, restarts, every, kills = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]
fabric = Fabric(accelerator="cpu", strategy=strategy, devices=ranks or "auto", max_restarts=restarts, accumulate=2)
fabric.launch()
fabric.seed_everything(3)
net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.01))
scheduler = fabric.setup_scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
inputs = torch.randn(60, 6, generator=torch.Generator().manual_seed(0))
targets = inputs.sum(1, keepdim=True)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(inputs, targets), 4, shuffle=True))

place = {"epoch": 0, "batches": 0}
if fabric.load_snapshot(place) and fabric.is_global_zero:
    print("continues at batch", place["batches"], flush=True)
attempt, batches = int(os.environ.get("PHALANX_ATTEMPT", 0)), place["batches"]
for epoch in range(place["epoch"], 2):
    for x, y in loader:
        with fabric.accumulate(model):
            fabric.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        batches += 1
        fabric.snapshot({"epoch": epoch, "batches": batches}, every="auto" if every == "auto" else int(every))
        if f"{attempt}:{fabric.global_rank}:{batches}" in kills:
            os.kill(os.getpid() if ranks else os.getsid(0), signal.SIGKILL)
            time.sleep(60)  # A rank dies shortly after its launcher, and must not get further.
weights = fabric.full_state_dict(model)
if fabric.is_global_zero:
    ends = torch.cat([each.flatten() for each in weights.values()]).tolist()
    print("ended", batches, [each.hex() for each in ends])
"""


def last_line(*args: object) -> tuple[str, list[str]]:
    done = run_script(LOOP, *map(str, args))
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    return next(line for line in lines if line.startswith("ended")), [
        line for line in lines if line.startswith("continues")
    ]


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2), ("zero2", 2)], ids=lambda value: str(value)
)
def test_a_loop_whose_ranks_were_killed_ends_with_the_same_weights(strategy: str, ranks: int) -> None:
    undisturbed, none = last_line(strategy, ranks, 0, 1)
    assert none == []
    # Within a window of two batches, after its update, and at the first batch of the next epoch.
    last, first_of_epoch = ranks - 1, {1: 16, 2: 9}[ranks]
    ends, continued = last_line(strategy, ranks, 3, 1, f"0:{last}:3", "1:0:6", f"2:{last}:{first_of_epoch}")
    assert ends == undisturbed
    assert len(continued) == 3


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_loop_goes_on_from_memory_after_its_node_is_lost(tmp_path: Path, strategy: str) -> None:
    undisturbed, _ = last_line(strategy, 2, 0, 1)
    (tmp_path / "loop.py").write_text(LOOP)
    arguments = ["--spares", "1", str(tmp_path / "loop.py"), strategy, "0", "0", "1", "0:1:7"]
    with several_nodes(3, *arguments, nodes="2", temporary=tmp_path) as nodes:
        codes, printed = outcome(nodes)
    assert codes == [0, -signal.SIGKILL, 0], printed
    lines = printed[0].splitlines()
    assert undisturbed in lines
    # Batch 6 was the last one of a window; its snapshot may still have been on its way to the other node.
    assert {"continues at batch 4", "continues at batch 6"} & set(lines)


def test_the_interval_is_found() -> None:
    undisturbed, _ = last_line("ddp", 2, 0, "auto")
    assert last_line("ddp", 2, 1, "auto", "0:0:12")[0] == undisturbed


def test_a_step_that_fails_twice_is_not_tried_again() -> None:
    done = run_script(LOOP, "ddp", "2", "5", "1", "0:1:7", "1:1:7", "2:1:7")
    assert done.returncode == 137, done.stdout
    assert "optimizer step 3 failed twice in a row" in done.stdout


def micro_batch(
    fabric: Fabric, model: Any, optimizer: Any, values: dict[str, Any] | None = None, every: int = 1
) -> bool:
    """Train on a micro-batch; return whether a snapshot was taken after it."""
    with fabric.accumulate(model):
        fabric.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return fabric.snapshot(values, every=every)


def test_no_snapshot_is_taken_within_a_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would lose the gradients of the window, also in a loop that has just been restored."""
    (tmp_path / "memory").mkdir()
    launch = Attempts(tmp_path, monkeypatch)
    for attempt in range(2):
        launch.begin()
        fabric = Fabric(accelerator="cpu", devices=1, accumulate=2)
        net = nn.Linear(3, 1)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        assert fabric.load_snapshot() == bool(attempt)
        assert [micro_batch(fabric, model, optimizer) for _ in range(4)] == [False, True, False, True]


def test_each_loop_of_a_script_has_snapshots_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").mkdir()
    launch, ends = Attempts(tmp_path, monkeypatch), list[torch.Tensor]()
    for attempt in range(2):
        launch.begin()
        for number in range(2):
            fabric = Fabric(accelerator="cpu", devices=1, accumulate=2)
            net = nn.Linear(3, 1)
            model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1 + number))
            values: dict[str, Any] = {"loop": None}
            assert fabric.load_snapshot(values) == bool(attempt)
            if attempt:
                assert values == {"loop": number}
                torch.testing.assert_close(net.weight, ends[number], rtol=0, atol=0)
            for _ in range(2):
                micro_batch(fabric, model, optimizer, {"loop": number})
            ends.append(net.weight.detach().clone())


def test_another_interval_takes_effect_from_the_call_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory").mkdir()
    Attempts(tmp_path, monkeypatch).begin()
    fabric = Fabric(accelerator="cpu", devices=1)
    net = nn.Linear(3, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    every = [1, 1, 3, 3, 3, 1]
    taken = [micro_batch(fabric, model, optimizer, every=each) for each in every]
    assert taken == [True, True, False, False, True, True]


def test_without_restarts_nothing_is_kept() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.setup(Tiny())
    assert fabric.load_snapshot({}) is False
    assert fabric.snapshot({"step": 1}) is False


def test_wrong_arguments_are_refused() -> None:
    with refuses(ConfigurationError, "max_restarts=-1"):
        Fabric(accelerator="cpu", devices=1, max_restarts=-1)
    fabric = Fabric(accelerator="cpu", devices=1)
    with refuses(ConfigurationError, "every=0"):
        fabric.snapshot(every=0)
    with refuses(ConfigurationError, "dict"):
        fabric.load_snapshot([1])  # type: ignore[arg-type]
