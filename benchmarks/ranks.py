"""Two ranks: a step beside plain ``DistributedDataParallel`` and ``fully_shard``, and what a step communicates.

Run as a module under torchrun it is one of the ranks.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from .sides import SIDES, ends_as_raw, missing, run
from .step import RAW, one_round
from .tables import Table, results
from .task import Job

RANKS = 2
STRATEGIES = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload", "zero3-nvme")
BY_HAND = {"fsdp": "raw", "zero2": "DeepSpeed"}
_COLLECTIVE, _UPDATE = "gloo:", "Optimizer.step#"
_WIDTHS = {"float": 4, "double": 8, "long int": 8, "unsigned char": 1, "int": 4, "bool": 1, "c10::BFloat16": 2}

Counts = dict[str, list[float]]


def ranks(rounds: int, quick: bool) -> Iterator[Table]:
    """The wall time and the communication of a step under ddp, for all sides."""
    found = _on_ranks("sides", rounds, 200 if quick else 1500)
    if not found:
        return
    rows = []
    for side, cell in found.items():
        pairs = list(zip(cell["rounds"], found[RAW]["rounds"], strict=True))
        added = statistics.median(own - its for own, its in pairs)
        ratio = statistics.median(own / its for own, its in pairs)
        rows.append([side, statistics.median(cell["rounds"]), added, f"{ratio:.3f}", *_cells(cell["counts"])])
    times = ("p10 wall time per step, µs", "p10 wall overhead, µs", "time relative to raw")
    yield Table("step on two ranks", ["program", *times, *_COMMUNICATION], rows)


_COMMUNICATION = ("collectives per step", "bytes per step", "collectives by type")


def strategies(rounds: int, quick: bool) -> Iterator[Table]:
    """The communication of each optimizer step under every strategy, and a step beside the library driven by hand."""
    rows = []
    for name in STRATEGIES[:3] if quick else STRATEGIES:
        for window, counts in (_on_ranks("strategy", 1, 4, name) or {}).items():
            rows.append([name, window, *_cells(counts)])
    yield Table(
        "communication of a GPT of 0.9 million parameters", ["strategy", "accumulated batches", *_COMMUNICATION], rows
    )
    rows = []
    for name in ("fsdp",) if quick else BY_HAND:
        walls = _on_ranks("by hand", rounds, 15 if quick else 40, name)
        if walls:
            ratio = statistics.median(own / its for its, own in zip(walls["by hand"], walls["phalanx"], strict=True))
            medians = [statistics.median(each) / 1000 for each in walls.values()]
            rows.append([name, *medians, f"{ratio:.3f}"])
    yield Table(
        "step beside the library driven by hand",
        ["strategy", "by hand, ms", "phalanx, ms", "phalanx relative to by hand"],
        rows,
    )


def _on_ranks(what: str, rounds: int, steps: int, *names: str) -> dict[str, Any]:
    found = results("benchmarks.ranks", what, str(rounds), str(steps), *names, ranks=RANKS, seconds=900)
    return dict(found[0]) if found else {}


def _cells(found: Counts) -> list[Any]:
    number, size = (sum(both[at] for both in found.values()) for at in (0, 1))
    kinds = ", ".join(f"{both[0]:g} {name}" for name, both in sorted(found.items()) if both[0])
    return [f"{number:g}", f"{size:,.0f}", kinds or "none"]


# ---- in a rank -------------------------------------------------------------------------------------------------------


def communication(function: Callable[[], object]) -> Counts:
    """Return the collectives of a function by name, how many and how many bytes each rank gives; and optimizer steps.

    The profiler sees every collective where it enters gloo, those of DDP's C++ reducer and those on groups of their own
    among them; wrapped Python functions would miss the former.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        function()
    found: Counts = {"steps": [0, 0]}
    for event in seen.profiler.kineto_results.events():
        kind, _, collective = event.name().partition(":")
        if event.name().startswith(_UPDATE):
            found["steps"][0] += 1
        elif f"{kind}:" == _COLLECTIVE:
            count = found.setdefault(collective, [0, 0])
            count[0] += 1
            given = zip(event.shapes(), event.dtypes(), strict=True)
            count[1] += sum(math.prod(shape) * _WIDTHS[dtype] for shape, dtype in given)
    return found


def of_a_step(side: str, job: Job) -> Counts:
    """Return the communication of an optimizer step, as the difference of two fits."""
    run(side, job)  # warm up
    short, long = (
        communication(lambda steps=steps: run(side, replace(job, steps=steps * job.accumulate)))  # type: ignore[misc]
        for steps in (4, 12)
    )
    return {
        name: [(long[name][at] - short.get(name, [0, 0])[at]) / 8 for at in (0, 1)] for name in long if name != "steps"
    }


def main() -> None:
    what, rounds, steps, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    if what == "sides":
        job = Job(int(steps), ranks=RANKS)
        sides = [side for side in SIDES if not missing(side)]
        for side in sides:
            ends_as_raw(side, job)
            found[side] = {"rounds": [], "counts": of_a_step(side, replace(job, steps=4))}
        for _ in range(int(rounds)):
            for side in sides:
                dist.barrier()
                found[side]["rounds"].append(one_round(side, job).least)
    elif what == "strategy":
        for window in (1, 4):
            job = Job(2 * window, model="0.9m", ranks=RANKS, strategy=names[0], accumulate=window)
            found[str(window)] = of_a_step("phalanx", job)
    else:
        job = Job(int(steps), model="0.9m", ranks=RANKS, strategy=names[0])
        found = {"by hand": [], "phalanx": []}
        for _ in range(int(rounds)):
            for title, side in (("by hand", BY_HAND[names[0]]), ("phalanx", "phalanx")):
                found[title].append(one_round(side, job).wall)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
