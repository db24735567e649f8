"""Costs by number of ranks: measured for as many ranks as this machine can start, computed for more.

If there are more ranks than cores, elapsed time mostly shows how long ranks wait for a core; CPU time is comparable.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from .growth_simulated import Found, simulated
from .processes import results
from .table import show

RANKS = (2, 4, 8, 16)
PRETENDED = (64, 256, 1024, 4096)
MILLI, MICRO, KILO, MEGA = 1e3, 1e6, 1 / 1024, 1 / 1024**2


def growth(rounds: int, quick: bool) -> None:
    """Print measurements of ranks on this machine, and the cost of the same functions with the input of more ranks."""
    measured(RANKS[:2] if quick else RANKS, quick)
    beyond(PRETENDED[:2] if quick else PRETENDED, 1 if quick else 8)


def measured(counts: tuple[int, ...], quick: bool) -> None:
    """Start ranks, and print the medians over them; of the times to rendezvous, the longest."""
    lengths = (10, 1) if quick else (200, 4)
    found = {count: ranks for count in counts if (ranks := _ranks(count, *lengths))}
    lazily = {count: _ranks(count, 0, 0, TORCH_GLOO_LAZY_INIT="1") for count in found}
    head = ["ranks", *map(str, found)]
    stages = ("met", "control", "apart")
    rows = [
        ["time to rendezvous, s", *(f"{max(_each(ranks, 'met seconds')):.1f}" for ranks in found.values())],
        _row("creating the control group, ms", found, "control seconds", MILLI),
        _row("of which CPU time, ms", found, "control computed", MILLI),
        _row("sent by the rendezvous for it, KiB", found, "control bytes", KILO),
        _row("the same, with lazy connections", lazily, "control bytes", KILO),
        *(_row(f"sockets, {_GROUPS[stage]}", found, f"{stage} sockets", 1) for stage in stages),
        _row("all these sockets, with lazy connections", lazily, "apart sockets", 1),
        *(_row(f"threads, {_GROUPS[stage]}", found, f"{stage} threads", 1) for stage in stages),
        _row("private memory before a model exists, MB", found, "apart private", MEGA),
    ]
    show("Start-up, for each rank", head, rows)
    rows = [
        _row("reduction through shared memory, µs of CPU time", found, "board computed", MICRO),
        _row("the same, µs elapsed", found, "board seconds", MICRO),
        _row("reduction on two nodes, µs of CPU time", found, "nodes computed", MICRO),
        _row("the same, µs elapsed", found, "nodes seconds", MICRO),
        _row("reduction through gloo, µs of CPU time", found, "gloo computed", MICRO),
        _row("the same, µs elapsed", found, "gloo seconds", MICRO),
        _row("all-gather of a small object, µs of CPU time", found, "object computed", MICRO),
        _row("the same, KiB received", found, "object received", KILO),
    ]
    show("Control messages, for each rank and operation", head, rows)
    for strategy in ("ddp", "fsdp"):
        _show_checkpoints(strategy, {count: [rank[strategy] for rank in ranks] for count, ranks in found.items()})


def _show_checkpoints(strategy: str, found: dict[int, list[Any]]) -> None:
    rows = [
        _row("files", found, "files", 1),
        _row("manifest, KiB", found, "manifest", KILO),
        _row("collectives of a save", found, "save exchanges", 1),
        ["received by rank 0, KiB", *(f"{ranks[0]['save received'] * KILO:.1f}" for ranks in found.values())],
        ["received by the last rank, KiB", *(f"{ranks[-1]['save received'] * KILO:.1f}" for ranks in found.values())],
        _row("a save, ms elapsed", found, "save seconds", MILLI),
        _row("collectives of a load", found, "load exchanges", 1),
        _row("received by each rank, KiB", found, "load received", KILO),
        _row("a load, ms elapsed", found, "load seconds", MILLI),
        _row("sockets of a rank", found, "sockets", 1),
    ]
    show(f"A checkpoint of a small GPT under {strategy}", ["ranks", *map(str, found)], rows)


_GROUPS = {"met": "default group", "control": "with control group", "apart": "with the group of an asynchronous save"}


def _each(ranks: list[Any], name: str) -> list[float]:
    return [rank[name] for rank in ranks]


def _row(label: str, found: dict[int, list[Any]], name: str, scale: float) -> list[str]:
    """Return a row of medians over all ranks."""
    return [label, *(_short(statistics.median(_each(ranks, name)) * scale) for ranks in found.values())]


def _short(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _ranks(count: int, operations: int, layers: int, **variables: str) -> list[dict[str, Any]]:
    """Start ranks; return the measurements of each. Without ``operations`` they only create their process groups."""
    arguments = str(count), str(time.monotonic()), str(operations), str(layers)
    found: list[list[dict[str, Any]]] = results("benchmarks.growth_rank", *arguments, variables=variables)
    return found[0] if found else []


def beyond(sizes: tuple[int, ...], layers: int) -> None:
    """Print what the same functions cost with the input that so many ranks would send."""
    found = simulated(sizes, layers)
    head = ["ranks", *map(str, sizes)]
    saved = found["checkpoint"]
    rows = [
        _computed("files", saved, "files", 1),
        _computed("pieces of tensors", saved, "parts", 1),
        _computed("plans that each rank receives, MB", saved, "plans", MEGA),
        _computed("random states that rank 0 receives, MB", saved, "documents", MEGA),
        _computed("assigning pieces to ranks, s on each rank", saved, "assign seconds", 1),
        _computed("manifest, MB", saved, "manifest", MEGA),
        _computed("serializing the manifest, s on rank 0", saved, "dump seconds", 1),
        _computed("parsing and checking the manifest, s on each rank", saved, "parse seconds", 1),
        _computed("memory of the parsed manifest, MB", saved, "parsed", MEGA),
        _computed("finding a rank's pieces on half as many ranks, s", saved, "map seconds", 1),
        _computed("files that such a rank opens", saved, "opened", 1),
    ]
    size = f"{saved[0]['elements'] / 1e9:.2g}e9 parameters, {saved[0]['tensors']:.0f} tensors"
    show(f"Computed: a checkpoint under fsdp, {size}", head, rows)
    rows = [
        _computed("next batch of a shuffled dataset, µs", found["sampling"], "training", MICRO),
        _computed("next batch of an evaluation, µs", found["sampling"], "evaluation", MICRO),
        _computed("reducing 20 means at the end of an epoch, ms", found["logged"], "seconds", MILLI),
        _computed("reading that many heartbeats, ms", found["watching"], "seconds", MILLI),
    ]
    show("Computed: work of a rank in a fit", head, rows)


def _computed(label: str, found: list[Found], name: str, scale: float) -> list[str]:
    return [label, *(_short(each[name] * scale) for each in found)]
