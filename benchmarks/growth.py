"""What grows with the number of ranks: measured on as many as this machine can start, computed for more.

Ranks may outnumber the cores: then seconds of the clock are those of the cores that they share, and only the
processor's time of a rank is its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .growth_simulated import Found, simulated
from .table import show

RANKS = (2, 4, 8, 16)
PRETENDED = (64, 256, 1024, 4096)
MILLI, MICRO, KILO, MEGA = 1e3, 1e6, 1 / 1024, 1 / 1024**2


def growth(rounds: int, quick: bool) -> None:
    """Print what ranks on this machine measure, and what the same code does with what more of them would tell."""
    measured(RANKS[:2] if quick else RANKS, quick)
    beyond(PRETENDED[:2] if quick else PRETENDED, 1 if quick else 8)


def measured(counts: tuple[int, ...], quick: bool) -> None:
    """Start ranks and print the medians over them; of the times that all wait for, the longest."""
    lengths = (10, 1) if quick else (200, 4)
    found = {count: ranks for count in counts if (ranks := _ranks(count, *lengths))}
    lazily = {count: _ranks(count, 0, 0, TORCH_GLOO_LAZY_INIT="1") for count in found}
    head = ["ranks", *map(str, found)]
    stages = ("met", "control", "apart")
    rows = [
        ["all have met, s", *(f"{max(_each(ranks, 'met seconds')):.1f}" for ranks in found.values())],
        _row("control group, ms", found, "control seconds", MILLI),
        _row("of which computed, ms", found, "control computed", MILLI),
        _row("the rendezvous sends for it, KiB", found, "control told", KILO),
        _row("the same, connected when needed", lazily, "control told", KILO),
        *(_row(f"sockets, {_GROUPS[stage]}", found, f"{stage} sockets", 1) for stage in stages),
        _row("sockets of these, connected when needed", lazily, "apart sockets", 1),
        *(_row(f"threads, {_GROUPS[stage]}", found, f"{stage} threads", 1) for stage in stages),
        _row("memory of its own before there is a model, MB", found, "apart private", MEGA),
    ]
    show("Starting: a rank of a machine", head, rows)
    rows = [
        _row("reduction through shared memory, µs computed", found, "board computed", MICRO),
        _row("the same, µs of the clock", found, "board seconds", MICRO),
        _row("reduction through gloo, µs computed", found, "gloo computed", MICRO),
        _row("the same, µs of the clock", found, "gloo seconds", MICRO),
        _row("exchange of a small object, µs computed", found, "object computed", MICRO),
        _row("the same, KiB received", found, "object received", KILO),
    ]
    show("What ranks say to one another, a rank's share", head, rows)
    for strategy in ("ddp", "fsdp"):
        _show_checkpoints(strategy, {count: [rank[strategy] for rank in ranks] for count, ranks in found.items()})


def _show_checkpoints(strategy: str, found: dict[int, list[Any]]) -> None:
    rows = [
        _row("files", found, "files", 1),
        _row("manifest, KiB", found, "manifest", KILO),
        _row("exchanges of a save", found, "save exchanges", 1),
        ["of which rank 0 receives, KiB", *(f"{ranks[0]['save received'] * KILO:.1f}" for ranks in found.values())],
        ["and the last rank, KiB", *(f"{ranks[-1]['save received'] * KILO:.1f}" for ranks in found.values())],
        _row("a save, ms of the clock", found, "save seconds", MILLI),
        _row("exchanges of a load", found, "load exchanges", 1),
        _row("of which a rank receives, KiB", found, "load received", KILO),
        _row("a load, ms of the clock", found, "load seconds", MILLI),
        _row("sockets of a rank", found, "sockets", 1),
    ]
    show(f"A checkpoint of a small GPT under {strategy}", ["ranks", *map(str, found)], rows)


_GROUPS = {"met": "default group", "control": "and control group", "apart": "and one of a save behind the training"}


def _each(ranks: list[Any], name: str) -> list[float]:
    return [rank[name] for rank in ranks]


def _row(label: str, found: dict[int, list[Any]], name: str, scale: float) -> list[str]:
    """Return a line of the medians of all ranks."""
    return [label, *(_short(statistics.median(_each(ranks, name)) * scale) for ranks in found.values())]


def _short(value: float) -> str:
    """Return a number with three digits that count, and no fraction where there is none."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _ranks(count: int, exchanges: int, layers: int, **variables: str) -> list[dict[str, Any]]:
    """Start ranks; return what each of them found. Without ``exchanges`` they only build their groups."""
    options = [str(time.monotonic()), str(exchanges), str(layers)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.growth_rank", str(count), *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
    )
    for line in done.stdout.splitlines():
        if line.startswith("FOUND "):
            found: list[dict[str, Any]] = json.loads(line.removeprefix("FOUND "))
            return found
    print(f"{count} ranks failed:\n{done.stderr[-3000:]}")
    return []


def beyond(sizes: tuple[int, ...], layers: int) -> None:
    """Print what the same functions do with what so many ranks would tell them."""
    found = simulated(sizes, layers)
    head = ["ranks", *map(str, sizes)]
    saved = found["checkpoint"]
    rows = [
        _computed("files", saved, "files", 1),
        _computed("pieces of tensors", saved, "parts", 1),
        _computed("told of pieces, by all ranks to each, MB", saved, "plans", MEGA),
        _computed("generators of all ranks, to rank 0, MB", saved, "documents", MEGA),
        _computed("who writes what, s on each rank", saved, "assign seconds", 1),
        _computed("manifest, MB", saved, "manifest", MEGA),
        _computed("writing it down, s on rank 0", saved, "dump seconds", 1),
        _computed("reading and checking it, s on each rank", saved, "parse seconds", 1),
        _computed("what it takes in memory then, MB", saved, "parsed", MEGA),
        _computed("finding what to read of it on half as many ranks, s", saved, "map seconds", 1),
        _computed("files that one of them opens", saved, "opened", 1),
    ]
    size = f"{saved[0]['elements'] / 1e9:.2g}e9 parameters, {saved[0]['tensors']:.0f} tensors"
    show(f"Computed: a checkpoint under fsdp, {size}", head, rows)
    rows = [
        _computed("a rank's next batch of a shuffled dataset, µs", found["sampling"], "training", MICRO),
        _computed("its next batch of an evaluation, µs", found["sampling"], "evaluation", MICRO),
        _computed("20 means at an epoch's end, ms", found["logged"], "seconds", MILLI),
        _computed("a look at the heartbeats of so many, ms", found["watching"], "seconds", MILLI),
    ]
    show("Computed: what a rank does in a fit", head, rows)


def _computed(label: str, found: list[Found], name: str, scale: float) -> list[str]:
    return [label, *(_short(each[name] * scale) for each in found)]
