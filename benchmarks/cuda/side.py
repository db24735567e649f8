"""The process of one side: trains the model, and sends a result for each phase that the parent asks for."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

import torch

from .cells import ALL_SIDES, Cell, phases, size_of
from .channel import Parent
from .clock import Clock
from .device import Device
from .job import Job
from .model import Batches


def main() -> None:
    parent = Parent()
    cell = Cell(**json.loads(sys.argv[1]))
    side, size, folder = ALL_SIDES[cell.side], size_of(cell.size, cell.tiny, cell.quick), Path(cell.folder)
    # Libraries are imported by all sides at once. The device is used by one after the other.
    fit = import_module(f"{__package__}.side_{side.module}").fit
    parent.send({"torch": torch.__version__})
    parent.wait()
    device, planned = Device(cell.device), phases(size, cell.compiled)
    clock = Clock(device, planned, parent.send, parent.wait, folder)
    batches = Batches(size, planned, device.is_cuda)
    fit(Job(size, side.strategy, side.options, cell.compiled, device.torch, clock, batches, folder))


if __name__ == "__main__":
    main()
