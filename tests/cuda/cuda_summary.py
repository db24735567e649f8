"""The summary of a run of the tests on CUDA devices: a dict for a file, and text for a reader."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

# Lines of each failure that are printed; the file has more.
_LINES = 45


def lines_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the entries of a file of results; an unfinished last line is left out."""
    file = folder / name
    found = []
    for line in file.read_text().splitlines() if file.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def collect(folder: Path, machine: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """Return all results of a run; each test counts once, by its worst outcome."""
    outcomes: dict[str, dict[str, Any]] = {}
    for entry in lines_of(folder, "outcomes.jsonl"):
        known = outcomes.get(entry["id"])
        if known is None or known["outcome"] != "failed":
            outcomes[entry["id"]] = entry
    expected = dict.fromkeys(entry["id"] for entry in lines_of(folder, "collected.jsonl"))
    missing = [name for name in expected if name not in outcomes]
    counts = Counter(entry["outcome"] for entry in outcomes.values())
    return {
        "machine": machine,
        "counts": {**counts, "not reached": len(missing)},
        "groups": groups,
        "measured": lines_of(folder, "measured.jsonl"),
        "not reached": missing,
        "tests": list(outcomes.values()),
    }


def is_good(results: dict[str, Any]) -> bool:
    """Whether tests passed, and every test was run and none failed."""
    counts = results["counts"]
    ended_well = all(group["exit code"] in (0, 5) for group in results["groups"])
    return ended_well and bool(counts.get("passed")) and not counts.get("failed") and not counts["not reached"]


def text_of(results: dict[str, Any]) -> str:
    """Return the summary: failures first, then skipped tests by reason, measured values, and totals."""
    tests = results["tests"]
    lines: list[str] = []
    for test in tests:
        if test["outcome"] == "failed":
            lines += [f"=== FAILED {test['id']} ({test['when']}, {test['seconds']:.1f} s)"]
            lines += [f"    {line}" for line in test["text"].splitlines()[-_LINES:]]
    for group in results["groups"]:
        if group["exit code"] not in (0, 1, 5) or group["stopped"]:
            lines += [f"=== GROUP {group['name']}: exit code {group['exit code']}, stopped: {group['stopped']}"]
            lines += [f"    {line}" for line in group["tail"]]
    skipped = Counter(test["text"] for test in tests if test["outcome"] == "skipped")
    lines += ["", "skipped:", *(f"{count:5d}  {reason}" for reason, count in skipped.most_common())] if skipped else []
    lines += (
        ["", "not reached:", *(f"       {name}" for name in results["not reached"])] if results["not reached"] else []
    )
    lines += ["", *_table(results["measured"])] if results["measured"] else []
    slowest = sorted(tests, key=lambda test: -test["seconds"])[:5]
    lines += ["", "slowest:", *(f"{test['seconds']:7.1f} s  {test['id']}" for test in slowest)]
    counts = ", ".join(f"{count} {name}" for name, count in results["counts"].items())
    machine = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    seconds = sum(group["seconds"] for group in results["groups"])
    return "\n".join([*lines, "", machine, f"{counts}; {seconds:.0f} s"])


def _table(measured: list[dict[str, Any]]) -> list[str]:
    width = max(len(entry["name"]) for entry in measured)
    rows = sorted((entry["name"], entry["value"], entry["unit"]) for entry in measured)
    return ["measured:", *(f"  {name.ljust(width)}  {value:12,.4g} {unit}" for name, value, unit in rows)]
