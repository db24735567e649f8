"""Ranks that end or are interrupted while others wait for their gradients in shared memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
from free_ports import free_port
from messages import refuses
from ranks import run_on_ranks, run_script
from torch import nn

from phalanx import Fabric
from phalanx.errors import RankError
from phalanx.framework.system.processes import is_running

RANKS = """
import os, signal, sys
import torch
from phalanx import Fabric

def train():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    model = torch.nn.Linear(2, 1)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(5):
        if step == 2 and fabric.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.backward(model(torch.ones(2, 2)).sum())
        optimizer.step()

children = []
for rank in ("0", "1"):
    children.append(os.fork())
    if children[-1] == 0:
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
        train()
        sys.exit()
print("rank 0 has ended with", os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]), flush=True)
print("rank 1 has ended with", os.waitstatus_to_exitcode(os.waitpid(children[1], 0)[1]), flush=True)
"""


def test_a_process_that_its_parent_has_not_waited_for_does_not_run() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(process.pid)
    assert is_running(os.getpid())


def test_a_rank_that_was_killed_is_noticed_though_its_parent_does_not_wait_for_it() -> None:
    shown = run_script(RANKS, str(free_port())).stdout
    assert "rank 1 (pid " in shown
    assert "is gone" in shown
    assert shown.splitlines()[-2:] == ["rank 0 has ended with 1", "rank 1 has ended with -9"]


class Alarm(Exception):
    pass


def raise_alarm(*_: object) -> None:
    raise Alarm


def go_on_after_an_alarm() -> str:
    """Raise an exception in a signal handler while rank 0 waits in backward for rank 1; catch it, and go on."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = nn.Linear(2, 1)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = signal.signal(signal.SIGALRM, raise_alarm)
    weights = net.weight.detach().clone()
    try:
        loss = model(torch.ones(2, 2)).sum()
        if fabric.global_rank == 1:
            time.sleep(0.6)
        else:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            fabric.backward(loss)
        except Alarm:
            with refuses(RankError, "Alarm", "averaged"):
                optimizer.step()
            assert torch.equal(net.weight, weights)
            with refuses(RankError, "Alarm", "averaged"):
                model(torch.ones(2, 2))
            return "refused"
        optimizer.step()
        return "trained"
    finally:
        signal.signal(signal.SIGALRM, before)


def test_weights_are_not_updated_after_a_backward_pass_that_was_interrupted() -> None:
    assert run_on_ranks(2, go_on_after_an_alarm) == ["refused", "trained"]
