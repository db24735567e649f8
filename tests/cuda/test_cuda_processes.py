"""Processes that use a device: forked ones of a notebook and of the fork server, and workers of loaders."""

from __future__ import annotations

from pathlib import Path

import pytest
from cuda_machine import needs_gpu
from cuda_plugin import Measured
from ranks import run_script

FORKED = """
import torch
from emulated_fits import Classifier, batches, emulated_trainer
from phalanx.framework.launch.fork_launcher import launch_function

def train():
    module = Classifier()
    emulated_trainer(1, max_steps=3).fit(module, batches(4))
    return len(module.kept), str(module.kept[0].device)

if __name__ == "__main__":
    assert torch.cuda.is_available()
    print("result", launch_function(train, (), 1, uses_cuda=True), torch.cuda.is_initialized(), flush=True)
"""

SERVED = """
import os
from emulated_fits import Classifier, batches, emulated_trainer
from phalanx.framework.launch.fork_server_main import NAME

class Noting(Classifier):
    def on_train_end(self):
        print("rank", os.getpid(), "of", os.getppid(), "on", self.kept[0].device, len(self.kept), flush=True)

if __name__ == "__main__":
    emulated_trainer(1, max_steps=3, max_restarts=1).fit(Noting(), batches(4))
"""

WORKERS = """
import torch
from emulated_fits import Classifier, batches, emulated_trainer
from torch.utils.data import DataLoader, TensorDataset

seen = set()

class Noting(Classifier):
    def on_train_batch_start(self, batch, batch_idx):
        seen.add(str(batch[0].device))

if __name__ == "__main__":
    torch.ones(1, device="cuda").sum()
    rows = TensorDataset(*(torch.cat(parts) for parts in zip(*batches(12))))
    module = Noting()
    loader = DataLoader(rows, 4, num_workers=2, persistent_workers=True)
    emulated_trainer(1, max_epochs=2).fit(module, loader)
    print("result", len(module.kept), seen, flush=True)
"""

CONTEXTS = """
import os, threading
import pynvml
import torch
from emulated_fits import Classifier, SaveAt, batches, emulated_trainer
import sys

def processes():
    pynvml.nvmlInit()
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        found += [(index, each.pid, each.usedGpuMemory) for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    return found

class Noting(Classifier):
    def on_train_end(self):
        print("processes", os.getpid(), os.getppid(), processes(), flush=True)

if __name__ == "__main__":
    root, last = sys.argv[1], int(sys.argv[2])
    emulated_trainer(
        [last], max_steps=7, max_restarts=1, callbacks=[SaveAt(root)], enable_checkpointing=None, default_root_dir=root,
    ).fit(Noting(logs=True), batches(8))
"""


@pytest.mark.timeout(120)
def test_a_function_is_launched_from_a_process_that_asked_for_devices() -> None:
    done = run_script(FORKED, is_new=True, device="cuda", timeout=100.0)
    assert "result (3, 'cuda:0') False" in done.stdout, done.stdout


@pytest.mark.timeout(120)
def test_a_rank_that_is_forked_from_the_server_uses_its_device() -> None:
    done = run_script(SERVED, is_new=True, device="cuda", timeout=100.0)
    assert done.returncode == 0, done.stdout
    assert "on cuda:0 3" in done.stdout, done.stdout


@pytest.mark.timeout(120)
def test_workers_of_a_loader_are_forked_from_a_rank_that_uses_its_device() -> None:
    done = run_script(WORKERS, is_new=True, device="cuda", timeout=100.0)
    assert "result 24 {'cuda:0'}" in done.stdout, done.stdout


@pytest.mark.alone
@pytest.mark.timeout(120)
@needs_gpu("driver that lists the processes which use a device")
def test_only_the_rank_has_a_context_and_only_on_its_device(tmp_path: Path, measured: Measured) -> None:
    import torch

    last = torch.cuda.device_count() - 1
    done = run_script(CONTEXTS, str(tmp_path), str(last), is_new=True, device="cuda", timeout=100.0)
    line = next((line for line in done.stdout.splitlines() if "processes" in line), None)
    assert line is not None, done.stdout
    _, own, parent, found = line[line.index("processes") :].split(maxsplit=3)
    listed = [tuple(map(str.strip, part.split(","))) for part in found.strip("[]() ").split("), (") if part]
    pids = [pid for _, pid, _ in listed]
    if own not in pids:
        pytest.skip(f"the driver lists processes by other numbers: {line}")
    assert parent not in pids, line
    assert [(index, pid) for index, pid, _ in listed if pid == own] == [(str(last), own)], line
    for _, pid, size in listed:
        if pid == own and size.isdigit():
            measured("memory of a rank of a small model, by NVML", int(size) / 2**20, "MiB")
