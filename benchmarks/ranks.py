"""One rank of a counted fit: prints its collectives. Run by ``collectives.py`` under torchrun."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from .sides import run
from .task import Job

COLLECTIVE = "gloo:"
UPDATE = "Optimizer.step#"
WIDTHS = {"float": 4, "double": 8, "long int": 8, "unsigned char": 1, "int": 4, "bool": 1, "c10::BFloat16": 2}


def communication(function: Callable[[], object]) -> dict[str, list[float]]:
    """Return the collectives of a function by name, how many and how many bytes each rank gives; and optimizer steps.

    The profiler sees every collective where it enters gloo, those of DDP's C++ reducer and those on groups of their own
    among them; wrapped Python functions would miss the former.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        function()
    found: dict[str, list[float]] = {"steps": [0, 0]}
    for event in seen.profiler.kineto_results.events():
        kind, _, collective = event.name().partition(":")
        if event.name().startswith(UPDATE):
            found["steps"][0] += 1
        elif f"{kind}:" == COLLECTIVE:
            count = found.setdefault(collective, [0, 0])
            count[0] += 1
            count[1] += sum(
                math.prod(shape) * WIDTHS[dtype] for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True)
            )
    return found


def main() -> None:
    name, jobs = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(1)
    if name != "phalanx":
        dist.init_process_group("gloo")
    run(name, Job(**jobs[0]))  # warm up
    found = [communication(partial(run, name, Job(**job))) for job in jobs]
    if dist.get_rank() == 0 if dist.is_initialized() else True:
        print(f"COUNTED {json.dumps(found)}\n", end="", flush=True)


if __name__ == "__main__":
    main()
