"""``phalanx data``: the samples that a run has read for a step, from the record that it has left."""

from __future__ import annotations

import argparse

from ..framework.core.errors import ConfigurationError
from ..framework.core.wording import counted
from ..framework.report.finding import find_run, shown_path
from ..framework.report.run_files import RunFiles
from ..framework.report.step_data import StepData, data_of_batch, data_of_step
from .terminal_text import say_json, say_wrapped


def show_data(given: argparse.Namespace) -> int:
    """Print what each rank has read; return the exit code."""
    directory = find_run(given.given_run)
    by_step = (given.step is not None, given.epoch is not None, given.batch is not None)
    if by_step not in ((True, False, False), (False, True, True)):
        raise ConfigurationError("give --step N, or --epoch E and --batch B.")
    events = RunFiles(directory).events
    if given.step is not None:
        reached = max((each.reached for each in events.attempts), default=0)
        found = data_of_step(events.marks, given.step, reached)
    else:
        found = [data_of_batch(events.marks, given.epoch, given.batch)]
    ranks = len(found[0].ranks or ())
    if given.rank is not None and ranks and not 0 <= given.rank < ranks:
        raise ConfigurationError(f"--rank {given.rank}: {counted(ranks, 'rank')} read different data, counted from 0.")
    if given.json:
        say_json({"schema": 1, "path": str(directory), "windows": [_as_json(each, given.rank) for each in found]})
        return 0
    for each in found:
        say_wrapped(f"{shown_path(directory)}, {_place(each)}")
        for rank, samples in _parts(each, given.rank):
            say_wrapped(f"  rank {rank}: {each.unit} {' '.join(map(str, samples)) or 'none'}")
        if each.ranks is None:
            say_wrapped(
                f"  {each.unit} {each.positions.start} to {each.positions.stop - 1} of the epoch, in the order of "
                f"{each.order}: only the program knows which samples those are."
            )
    return 0


def _place(data: StepData) -> str:
    numbers = f"{data.batches.start}" if len(data.batches) == 1 else f"{data.batches.start} to {data.batches.stop - 1}"
    items = counted(len(data.positions), {"samples": "sample"}.get(data.unit, "batch"))
    step = "" if data.step is None else f"step {data.step}: "
    return f"{step}epoch {data.epoch}, batch {numbers} ({items}){'' if data.applied else ', no update'}"


def _parts(data: StepData, rank: int | None) -> list[tuple[int, list[int]]]:
    parts = list(enumerate(data.ranks or []))
    return parts if rank is None else parts[rank : rank + 1]


def _as_json(data: StepData, rank: int | None) -> dict[str, object]:
    return {
        "step": data.step,
        "epoch": data.epoch,
        "batches": [*data.batches],
        "applied": data.applied,
        "unit": data.unit,
        "positions": [data.positions.start, data.positions.stop],
        "order": data.order,
        "ranks": None if data.ranks is None else [{"rank": r, "indices": each} for r, each in _parts(data, rank)],
    }
