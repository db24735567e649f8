"""``phalanx selftest``: train under each strategy on two ranks, and compare the losses with plain torch."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from ..framework.core.errors import PhalanxError, RankError
from ..framework.core.precision import resolve_precision
from ..framework.core.registry import STRATEGIES
from ..framework.launch import launch_function
from ..framework.system.environment import nvme_default, variables_set
from .commands import CHECK_FAILED
from .selftest_model import train_by_hand, train_with
from .terminal_text import fitted_table, say, say_json, say_wrapped

RANKS = 2
# Of a loss in float32; sums in another order differ by about a millionth.
TOLERANCE = 1e-4
OK, MISS, FAILED, SKIPPED = "ok", "differs", "failed", "skipped"
_COLORS = {OK: "green", MISS: "red", FAILED: "red", SKIPPED: "faint"}


@dataclass(frozen=True)
class Result:
    """The outcome of one strategy."""

    strategy: str
    state: str
    ranks: int = 0
    difference: float | None = None
    """The largest difference of a step's loss to that of plain torch, relative."""
    seconds: float = 0.0
    reason: str = ""


def compare_strategies(given: argparse.Namespace) -> int:
    """Print the outcome of every strategy; return the exit code: 69 if one differs or fails."""
    names = [STRATEGIES.canonical(name) for name in given.only] or list(STRATEGIES)
    device_type = given.accelerator
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    began, results = time.monotonic(), []
    for result in _results(names, device_type):
        results.append(result)
        if not given.json and sys.stderr.isatty():
            print(f"\r\x1b[K{len(results)}/{len(names)} {result.strategy}", end="", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    good = all(result.state in (OK, SKIPPED) for result in results)
    if given.json:
        say_json({"schema": 1, "good": good, "device": device_type, "seconds": seconds, "strategies": results})
    else:
        if sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        _show(results, device_type, seconds)
    return 0 if good else CHECK_FAILED


def _results(names: Sequence[str], device_type: str) -> Iterator[Result]:
    """Train under one strategy after the other, each in ranks of its own that are forked from this process."""
    with ExitStack() as stack:
        # For strategies that keep state on a disk, unless the user has named a folder.
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(variables_set(nvme_default(folder)))
        expected: list[float] = launch_function(train_by_hand, (device_type,), 1, uses_cuda=device_type == "cuda")
        for name in names:
            yield _compare(name, device_type, expected)


def _compare(name: str, device_type: str, expected: Sequence[float]) -> Result:
    began = time.monotonic()
    try:
        ranks, libraries = _prepare(name, device_type)
        for library in libraries:
            import_module(library)
    except (PhalanxError, ImportError, OSError) as error:
        return Result(name, SKIPPED, reason=_sentence(error))
    try:
        losses = launch_function(train_with, (name, ranks, device_type), ranks, uses_cuda=device_type == "cuda")
    except (PhalanxError, OSError) as error:
        return Result(name, FAILED, ranks, seconds=time.monotonic() - began, reason=_sentence(error))
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)]
    # The largest, or one that is not a number, which compares as False.
    difference = next((each for each in differences if each != each), max(differences))
    state = OK if difference <= TOLERANCE else MISS
    return Result(name, state, ranks, difference, time.monotonic() - began)


def _prepare(name: str, device_type: str) -> tuple[int, list[str]]:
    """Return the number of ranks of a strategy, and the modules that its ranks import.

    Raises:
        PhalanxError: it cannot be used on this machine.
    """
    precision, refusals = resolve_precision(None), []
    for ranks in (RANKS, 1):
        try:
            strategy: Any = STRATEGIES.load(name)()
            strategy.check(ranks, device_type, 1, precision)
            return ranks, [library.format(device_type=device_type) for library in strategy.libraries]
        except PhalanxError as error:
            refusals.append(error)
    raise refusals[0]


def _sentence(error: BaseException) -> str:
    """Return the last line of a rank's traceback, or else the first line of the message."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[-1 if isinstance(error, RankError) else 0].strip()


def _show(results: Sequence[Result], device_type: str, seconds: float) -> None:
    rows = []
    for each in results:
        difference = "-" if each.difference is None else f"{each.difference:.1e}"
        rows.append([each.strategy, each.state, str(each.ranks or "-"), difference, f"{each.seconds:.1f}"])
    fitted_table(["strategy", "", "ranks", "difference", "seconds"], rows, [_COLORS[each.state] for each in results])
    for each in results:
        if each.reason:
            say_wrapped(f"{each.strategy}: {each.reason}")
    count = sum(each.state == OK for each in results)
    say(f"{count} of {len(results)} strategies train as plain torch does on {device_type}, in {seconds:.0f} s")
