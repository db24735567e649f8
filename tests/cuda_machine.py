"""The CUDA devices of tests: those of the machine, or emulated ones in a build of torch without CUDA."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
# Not by `torch.backends.cuda.is_built`, which an emulated device answers too.
EMULATED = torch.version.cuda is None and torch.version.hip is None


def num_devices() -> int:
    """Return the number of devices that processes of tests see, even if this one does not. CUDA is not started."""
    if not EMULATED:
        return torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return 2 if visible is None else len([index for index in visible.split(",") if index in ("0", "1")])


def variables() -> dict[str, str]:
    """Return the variables with which a new interpreter has devices; builds the emulation if it is needed."""
    if not EMULATED:
        return {}
    # The folder of the emulation is not on the path of every test.
    sys.path.insert(0, str(TESTS / "emulated_cuda"))
    try:
        importlib.import_module("emulation_build").libraries()
        found: dict[str, str] = importlib.import_module("cuda_emulation").variables()
    finally:
        sys.path.pop(0)
    return found


def shares_device(num_ranks: int) -> bool:
    """Whether so many ranks have to share the only device."""
    return num_devices() == 1 < num_ranks


def rank_variables(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return the variables of a rank: those of Open MPI for ranks that share a device.

    A task of a cluster that shows each task one device uses the first one that it sees, whatever its rank. ``port`` is
    that of the store of the group that the ranks are in.
    """
    if not shares_device(num_ranks):
        return {}
    values = {"RANK": rank, "SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_SIZE": num_ranks}
    placement = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}
    return {**placement, "MASTER_PORT": str(port)}


def backend(num_ranks: int) -> str:
    """Return the backend of a process group of ranks with devices."""
    if not shares_device(num_ranks):
        return "cpu:gloo,cuda:nccl"
    sys.path.append(str(TESTS / "cuda"))
    name: str = importlib.import_module("staged_group").register()
    return name


def needs_devices(count: int) -> pytest.MarkDecorator:
    """Return the mark of tests that need several devices."""
    return pytest.mark.skipif(num_devices() < count, reason=f"needs {count} devices, and there are {num_devices()}")


def needs_gpu(what: str) -> pytest.MarkDecorator:
    """Return the mark of tests of a feature that emulated devices do not have."""
    return pytest.mark.skipif(EMULATED, reason=f"emulated devices have no {what}")


def needs_emulation(what: str) -> pytest.MarkDecorator:
    """Return the mark of tests of what only emulated devices report."""
    return pytest.mark.skipif(not EMULATED, reason=f"only emulated devices {what}")
