"""The cost of a step over the raw loop: bare, with common features, with logged values, with callbacks."""

from __future__ import annotations

from .sides import NAMES, Price, prices
from .table import show
from .task import Job


def bare_and_everyday(rounds: int, quick: bool) -> None:
    """The cost of a bare step, and of one with the common features."""
    steps = 500 if quick else 2000
    cells = {name: (name, Job(steps)) for name in NAMES}
    cells |= {f"{name} barebones": (name, Job(steps, barebones=True)) for name in ("phalanx", "lightning")}
    cells |= {f"{name} everyday": (name, Job(steps, everyday=True)) for name in NAMES if name != "raw"}
    found = prices(cells, rounds)
    raw = found["raw"]
    rows = [
        [
            label,
            price.median_cpu,
            price.median_cpu - raw.median_cpu,
            f"{price.median_cpu / raw.median_cpu:.2f}",
            price.median_wall,
            price.median_wall - raw.median_wall,
            spread(price),
        ]
        for label, price in found.items()
    ]
    head = ["a step, µs", "cpu", "over raw", "ratio", "wall", "over raw", "cpu, least to most"]
    show(f"Price of a step, medians of {rounds} rounds", head, rows)


def logged_values(rounds: int, quick: bool) -> None:
    """The cost of logging 1, 10 and 100 values in every step, over the same fit without logging."""
    lengths = {1: 2000, 10: 1000, 100: 200}
    rows = []
    for values, steps in lengths.items():
        steps = max(steps // 4, 100) if quick else steps
        cells = {f"{name} {kind}": (name, Job(steps, values=kind)) for name in NAMES for kind in (0, values)}
        found = prices(cells, rounds)
        rows.append([f"{values} values", *(_over(found, f"{name} 0", f"{name} {values}") for name in NAMES)])
    show(f"Logged values, cpu µs a step over logging none, medians of {rounds} rounds", ["", *NAMES], rows)


def callbacks(rounds: int, quick: bool) -> None:
    """The cost of 100 callbacks, with one empty hook each and without hooks."""
    steps = 400 if quick else 2000
    cells: dict[str, tuple[str, Job]] = {}
    for name in NAMES:
        cells[f"{name} none"] = name, Job(steps)
        cells[f"{name} empty"] = name, Job(steps, callbacks=100, overriding=True)
        cells[f"{name} idle"] = name, Job(steps, callbacks=100)
    found = prices(cells, rounds)
    rows = [
        [title, *(_over(found, f"{name} none", f"{name} {kind}") for name in NAMES)]
        for kind, title in (("empty", "100 with one empty hook"), ("idle", "100 that override nothing"))
    ]
    show(f"Callbacks, cpu µs a step over none, medians of {rounds} rounds", ["", *NAMES], rows)


def spread(price: Price) -> str:
    """Return the range of a cost over the rounds."""
    return f"{min(price.cpu):.0f} to {max(price.cpu):.0f}"


def _over(found: dict[str, Price], base: str, label: str) -> object:
    if base not in found or label not in found:
        return "-"
    # Each round measured both a moment apart, so their difference is steadier than the difference of medians.
    differences = sorted(b - a for a, b in zip(found[base].cpu, found[label].cpu, strict=True))
    middle = len(differences) // 2
    return differences[middle] if len(differences) % 2 else (differences[middle - 1] + differences[middle]) / 2
