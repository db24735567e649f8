"""The cells of the table of semantics: the result of an action at a moment, under a strategy and a number of ranks.

*Right* is the result of plain torch on the global batches. *Refused* is an exception of phalanx's own whose sentence
says what to use instead. Anything else is *wrong*: other numbers, another exception, ranks that wait for one another, a
crash.
"""

from __future__ import annotations

import pickle
import re
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import actions_in_steps
import actions_on_dtypes
import actions_on_gradients
import actions_on_modules
import actions_on_optimizers
import actions_on_weights
import torch
from parity_table import strategy_named
from ranks import run_on_ranks, run_script
from semantic_plain import by_hand
from semantic_program import Action, Outcome, run
from torch import Tensor

from phalanx.errors import NonFiniteError, PhalanxError, Preempted, RankError, StalledError

SOURCES = (
    *(actions_on_weights, actions_on_gradients, actions_on_optimizers),
    *(actions_in_steps, actions_on_dtypes, actions_on_modules),
)
ACTIONS: dict[str, Action] = {action.name: action for source in SOURCES for action in source.ACTIONS}
SECONDS = 8.0
"""How long a cell may take; one takes less than a second."""
# A launcher waits a minute longer for ranks that wait for one another.
_LAUNCHED_SECONDS = 120.0
# How long a rank waits for the others to end after it has failed.
_OTHERS_SECONDS = 3.0
_TOLERANCE_OF_VALUES = 1e-4
# How much of what the ranks printed a crash shows.
_SHOWN = 8000
_IMPERATIVES = re.compile(
    r"\b(use|set|call|pass|give|write|read|build|copy|choose|compute|convert|create|define|do|edit|freeze|gather|keep|leave"
    r"|load|log|make|move|put|register|remove|replace|return|run|set|start|step|take|train|turn|wrap|change|add|clip"
    r"|initialize|assign|save|join)\b",
    re.IGNORECASE,
)
# In gloo's error on a rank that waits for one that has ended. A launcher shows the error of that one.
_OTHER_HAS_LEFT = "by peer"
# Not refusals: a rank waits or has failed, or the numbers are not finite.
_NO_REFUSALS = (StalledError, RankError, NonFiniteError, Preempted)
RIGHT, REFUSED, WRONG = "right", "refused", "wrong"


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of ranks."""

    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy}@{self.ranks}"

    @property
    def parts(self) -> int:
        """How many ranks have data of their own."""
        if self.strategy == "pipeline":
            return 1
        return self.ranks // 2 if self.strategy.endswith("+tp") else self.ranks


@dataclass(frozen=True)
class Cell:
    """An action at a moment under a layout."""

    action: str
    moment: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.action} | {self.moment} | {self.layout}"


@dataclass(frozen=True)
class Verdict:
    """The result of a cell: right, refused or wrong, with the message or the difference."""

    word: str
    what: str = ""


@dataclass
class Failed:
    """A rank ended by an exception."""

    is_refusal: bool
    what: str
    is_consequence: bool = False
    """Whether it only says that another rank has left."""


def given_strategy(layout: Layout, folder: str) -> tuple[Any, str | None]:
    """Return the arguments ``strategy`` and ``parallel``. A name with a colon is a class or function in a module."""
    if ":" in layout.strategy:
        module, _, name = layout.strategy.partition(":")
        return getattr(import_module(module), name)(), None
    if layout.strategy == "pipeline":
        return "pipeline", f"pp={layout.ranks}"
    return strategy_named(layout.strategy, folder), None


def on_rank(cell: Cell, folder: str) -> Outcome | Failed:
    """Train a cell on this rank; raise if it fails while another rank does not end. Writes the outcome into a file."""
    from phalanx.framework.distributed.world import World

    rank = World.from_environment("cpu").rank
    try:
        strategy, parallel = given_strategy(cell.layout, folder)
        outcome: Outcome | Failed = run(
            ACTIONS[cell.action], cell.moment, strategy, cell.layout.ranks, parallel, folder
        )
    except Exception as error:
        outcome = failed(error)
    path = Path(folder) / f"rank{rank}"
    path.with_suffix(".part").write_bytes(pickle.dumps(outcome))
    path.with_suffix(".part").rename(path)
    if isinstance(outcome, Failed):
        _wait_for_others(cell, folder)
    return outcome


def _wait_for_others(cell: Cell, folder: str) -> None:
    """Wait until all ranks have ended, so that the next cell finds them at one place."""
    until = time.monotonic() + _OTHERS_SECONDS
    while len(list(Path(folder).glob("rank?"))) < cell.layout.ranks:
        if time.monotonic() > until:
            raise TimeoutError("the other ranks wait for this one")
        time.sleep(0.02)


def failed(error: Exception) -> Failed:
    """Describe an exception: its class, its sentence, and where it comes from."""
    sentence = f"{type(error).__name__}: {error}"
    refuses = isinstance(error, PhalanxError) and not isinstance(error, _NO_REFUSALS)
    if refuses and _IMPERATIVES.search(str(error)):
        return Failed(True, sentence)
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    what = f"{'no way out: ' if refuses else ''}{' '.join(sentence.split())[:300]} ({where})"
    return Failed(False, what, is_consequence=isinstance(error, RankError) or _OTHER_HAS_LEFT in str(error))


@cache
def expected(action: str, moment: str, parts: int) -> list[Outcome]:
    """Return what plain torch gives."""
    return by_hand(ACTIONS[action], moment, parts)


def tried(cell: Cell, seconds: float = SECONDS) -> Verdict:
    """Train a cell and compare it."""
    wanted = expected(cell.action, cell.moment, cell.layout.parts if ACTIONS[cell.action].by_part else 1)
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run_on_ranks(cell.layout.ranks, on_rank, cell, folder, timeout=seconds)
        except AssertionError as error:
            if not str(error).startswith(on_rank.__name__):
                # The ranks did not start.
                raise
            files = sorted(Path(folder).glob("rank?"))
            return stopped(cell, [pickle.loads(path.read_bytes()) for path in files], str(error))
    failures = [each for each in found if isinstance(each, Failed)]
    if failures:
        return of_failures(failures)
    return compared(cell, found, wanted)


def of_failures(failures: Sequence[Failed]) -> Verdict:
    """Judge ranks that ended by exceptions: each must be a refusal, or say that a rank has left after its refusal."""
    refused = [each for each in failures if each.is_refusal]
    other = next((each for each in failures if not (each.is_refusal or (refused and each.is_consequence))), None)
    return Verdict(REFUSED, refused[0].what) if other is None else Verdict(WRONG, other.what)


def stopped(cell: Cell, ended: Sequence[Outcome | Failed], message: str) -> Verdict:
    """Judge ranks of which some did not end, or left something behind."""
    failures = [each for each in ended if isinstance(each, Failed)]
    if "died: " in message and not any(each.is_refusal for each in failures):
        # How it died, the stack that it printed as it did, and what it printed before.
        return launched(cell, f"crash: {message.partition('died: ')[2][:_SHOWN]}")
    if failures:
        # A launcher stops the other ranks.
        return of_failures(failures)
    if len(ended) == cell.layout.ranks:
        return Verdict(WRONG, " ".join(message.split())[-300:])
    return launched(cell, f"hang: {cell.layout.ranks - len(ended)} ranks did not end")


def launched(cell: Cell, what: str) -> Verdict:
    """Judge ranks that crash or wait for each other by the last line that their launcher prints."""
    if cell.layout.ranks == 1 or ":" in cell.layout.strategy:
        return Verdict(WRONG, what)
    script = Path(__file__).with_name("semantic_launched.py")
    try:
        arguments = cell.layout.strategy, str(cell.layout.ranks), cell.action, cell.moment
        done = run_script(script, *arguments, timeout=_LAUNCHED_SECONDS)
    except AssertionError as error:
        return Verdict(WRONG, f"{what}; {error}")
    last = done.stdout.rstrip().rpartition("\n")[2]
    is_explained = done.returncode != 0 and "step" in last and _IMPERATIVES.search(last)
    return Verdict(REFUSED, f"The launcher: {last}") if is_explained else Verdict(WRONG, f"{what}; {last}")


def compared(cell: Cell, found: Sequence[Outcome], wanted: Sequence[Outcome]) -> Verdict:
    """Compare what ranks have with what plain torch has: values, metrics and weights."""
    problems = []
    for rank, outcome in enumerate(found):
        right = wanted[rank % len(wanted)].seen
        if len(outcome.seen) != len(right):
            problems.append(f"rank {rank} saw {len(outcome.seen)} values instead of {len(right)}")
        elif (off := farthest(outcome.seen, right)) is not None:
            problems.append(f"rank {rank} saw {outcome.seen[off]:.6g} instead of {right[off]:.6g}")
    for name, value in wanted[0].metrics.items():
        logged = found[0].metrics.get(name)
        if logged is None or farthest([logged], [value]) is not None:
            problems.append(f"logged {name}={logged} instead of {value:.6g}")
    problems += differences(next((each.weights for each in found if each.weights), None), wanted[0].weights, cell)
    return Verdict(WRONG, "; ".join(problems[:3])) if problems else Verdict(RIGHT)


def farthest(values: Sequence[float], right: Sequence[float]) -> int | None:
    """Return where a value is first off."""
    near = [
        abs(one - other) <= _TOLERANCE_OF_VALUES * abs(other) + 1e-6 for one, other in zip(values, right, strict=True)
    ]
    return near.index(False) if False in near else None


def differences(found: Mapping[str, Tensor] | None, wanted: Mapping[str, Tensor] | None, cell: Cell) -> list[str]:
    """Return how weights differ from plain torch's."""
    assert wanted is not None
    if found is None:
        return ["no rank has the weights"]
    if found.keys() != wanted.keys():
        return [f"other names of weights: {sorted(found.keys() ^ wanted.keys())[:4]}"]
    worst, name = max((distance(found[name], wanted[name]), name) for name in wanted)
    return [f"{name} is {worst:.1e} off"] if not worst <= ACTIONS[cell.action].tolerance else []


def distance(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if not wanted.numel():
        return 0.0
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    found, wanted = found.to(kind), wanted.to(kind)
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-2))
