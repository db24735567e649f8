"""The table of semantics: what programs do to weights, gradients and modules means the same under every strategy.

    python tests/semantics.py                                     every strategy, on 2 ranks at every moment
    python tests/semantics.py --all                               every moment on every number of ranks
    python tests/semantics.py --strategy fsdp --ranks 2           some of them; each option may be repeated
    python tests/semantics.py --action clamp --moment on_train_batch_end
    python tests/semantics.py --strategy my_package.strategies:MyStrategy
    python tests/semantics.py --write docs/semantics.md           and into a page, between its marks

A cell trains a small transformer for 4 steps, in which an action is done at a moment: see ``semantic_program.py``. It
is right, refused or wrong: see ``semantic_cells.py``. The command ends with 1 if a cell is wrong.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from marked_pages import write_table
from ranks import close_pools, end_ranks, preload
from semantic_cells import ACTIONS, REFUSED, RIGHT, WRONG, Cell, Layout, Verdict, tried

from phalanx.framework.core.wording import counted

RANKS: dict[str, tuple[int, ...]] = {
    "single": (1,),
    "ddp": (1, 2, 3),
    "fsdp": (1, 2, 3),
    "hsdp": (2,),
    "fsdp-offload": (2,),
    "zero1": (1, 2, 3),
    "zero2": (1, 2, 3),
    "zero3": (1, 2, 3),
    "zero2-offload": (2,),
    "zero3-offload": (2,),
    "fsdp+tp": (2,),
    "pipeline": (2, 3),
}
"""On how many ranks each strategy is tried."""
EVERY_MOMENT = ("single@1", "ddp@2", "fsdp@2", "zero2@2", "zero3@2", "pipeline@2")
"""The layouts that try every moment. Other layouts try one moment of each action, not all the same one."""
# DeepSpeed keeps memory of every engine that a process has had.
_CELLS_OF_A_PROCESS = 150
# Where moments of an action have different verdicts, those are named that are fewer.
_SIGNS = {RIGHT: "=", REFUSED: "refused", WRONG: "**wrong**"}

Verdicts = dict[Cell, Verdict]


def cells(
    strategies: Sequence[str] = (), ranks: Sequence[int] = (), actions: Sequence[str] = (), moments: Sequence[str] = ()
) -> list[Cell]:
    """Return the cells of some strategies, numbers of ranks, actions and moments; an empty argument stands for all.

    ``actions``: parts of their names. Strategies that are not in the table are tried on 1, 2 and 3 ranks.
    """
    layouts = [
        Layout(strategy, number)
        for strategy in strategies or RANKS
        for number in RANKS.get(strategy, (1, 2, 3))
        if not ranks or number in ranks
    ]
    return [
        Cell(action.name, moment, layout)
        for layout in layouts
        for action in ACTIONS.values()
        if not actions or any(part in action.name for part in actions)
        for moment in action.moments
        if not moments or moment in moments
    ]


def spread() -> list[Cell]:
    """Return every cell of the layouts in ``EVERY_MOMENT``, and for each other a moment of each action, in turn."""
    layouts = [Layout(strategy, number) for strategy, numbers in RANKS.items() for number in numbers]
    found = []
    for layout in layouts:
        for index, action in enumerate(ACTIONS.values()):
            one = action.moments[(index + layouts.index(layout)) % len(action.moments)]
            moments = action.moments if str(layout) in EVERY_MOMENT else (one,)
            found += [Cell(action.name, moment, layout) for moment in moments]
    return found


def fill(chosen: Sequence[Cell], wrong: Path | None = None) -> Verdicts:
    """Try cells, print those that are wrong, and append them to a file."""
    verdicts: Verdicts = {}
    layout, count = None, 0
    for cell in chosen:
        if cell.layout != layout or count == _CELLS_OF_A_PROCESS:
            end_ranks()
            if cell.layout != layout:
                print(cell.layout, flush=True)
            layout, count = cell.layout, 0
        count += 1
        verdict = verdicts[cell] = tried(cell)
        if verdict.word == WRONG:
            line = f"{cell} | {verdict.what}"
            print(f"wrong: {line}", flush=True)
            if wrong is not None:
                with wrong.open("a") as file:
                    file.write(f"{line}\n")
    return verdicts


def wrong_cells(strategy: str, ranks: int = 2) -> Verdicts:
    """Return the cells of a strategy that are wrong. ``strategy``: a registered name, or ``package.module:Class``."""
    try:
        return {cell: each for cell, each in fill(cells([strategy], [ranks])).items() if each.word == WRONG}
    finally:
        close_pools()


def summary(verdicts: Mapping[Cell, Verdict], seconds: float) -> str:
    """Return the numbers of cells in a sentence."""
    right, refused, wrong = (sum(each.word == word for each in verdicts.values()) for word in (RIGHT, REFUSED, WRONG))
    names = {cell.action for cell in verdicts}
    text = (
        f"The {len(verdicts):,} runs of {len(names)} actions took {seconds / 60:.0f} min. Of these runs, {right:,} "
        f"gave the same values as plain PyTorch, {refused:,} raised an error, and {wrong:,} gave a wrong result."
    )
    return textwrap.fill(text, 120)


def table(verdicts: Mapping[Cell, Verdict]) -> str:
    """Return the cells as a Markdown table for each group of actions, with a column for each strategy."""
    strategies = list(dict.fromkeys(cell.layout.strategy for cell in verdicts))
    parts = []
    for row in dict.fromkeys(ACTIONS[cell.action].row for cell in verdicts):
        lines = [
            f"| {row} | " + " | ".join(f"`{name}`" for name in strategies) + " |",
            "|---" * (len(strategies) + 1) + "|",
        ]
        for action in dict.fromkeys(cell.action for cell in verdicts if ACTIONS[cell.action].row == row):
            shown = [_shown(verdicts, action, strategy) for strategy in strategies]
            lines.append(f"| {action.replace('|', ' ')} | " + " | ".join(shown) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _shown(verdicts: Mapping[Cell, Verdict], action: str, strategy: str) -> str:
    """Return ``=`` if all moments are right, else the number of moments with each result."""
    words = [each.word for cell, each in verdicts.items() if cell.action == action and cell.layout.strategy == strategy]
    kinds = [word for word in _SIGNS if word in words]
    if len(kinds) <= 1:
        return "".join(_SIGNS[word] for word in kinds)
    return ", ".join(f"{_SIGNS[word]} in {counted(words.count(word), 'run')}" for word in kinds)


# What differs between the messages of one error: quoted text with a dtype, dotted names, the names of classes, numbers.
_VARIES = re.compile(
    r"'[^']*'(?: in \w+)?|\w+(?:\.\w+)+(?:, \w+(?:\.\w+)+)*(?: and \d+ more)?|\b[A-Z]\w+|\d+(?:, \d+)*"
    r"|^\S+(?= (?:is|has) )|\w+(?= had no part)"
)
_LISTED = 6
"""How many actions a row of the table of errors lists."""


def sentences(verdicts: Mapping[Cell, Verdict]) -> str:
    """Return what is refused, a line for each error with its shortest message, its strategies and its actions."""
    messages: dict[str, str] = {}
    strategies: dict[str, list[str]] = {}
    actions: dict[str, list[str]] = {}
    for cell, verdict in verdicts.items():
        if verdict.word == REFUSED:
            sentence = re.sub(r"^rank \d+ \(pid \d+\)", "a rank", " ".join(verdict.what.partition(": ")[2].split()))
            sentence = sentence.replace("|", " ")
            error = _VARIES.sub("", sentence)
            messages[error] = min(messages.get(error, sentence), sentence, key=len)
            for listed, name in ((strategies, cell.layout.strategy), (actions, cell.action)):
                if name not in (names := listed.setdefault(error, [])):
                    names.append(name)
    lines = ["| message | strategies | actions |", "|---|---|---|"]
    for error, message in messages.items():
        names, more = actions[error], len(actions[error]) - _LISTED
        shown = "; ".join(names) if more <= 0 else f"{'; '.join(names[:_LISTED])}; and {more} others"
        lines.append(f"| `{message}` | {', '.join(f'`{name}`' for name in strategies[error])} | {shown} |")
    return "\n".join(lines)


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", action="append", default=[], help="this one alone: a name, or a module:Class")
    parser.add_argument("--ranks", action="append", default=[], type=int, help="this number of ranks alone")
    parser.add_argument("--action", action="append", default=[], help="actions with this in their names")
    parser.add_argument("--moment", action="append", default=[], help="this moment alone")
    parser.add_argument("--all", action="store_true", help="all moments on all numbers of ranks; several times as long")
    parser.add_argument("--write", type=Path, help="a page whose part between the marks becomes the tables")
    parser.add_argument("--wrong", type=Path, help="a file to which the wrong cells are appended")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a cell is wrong."""
    chosen = _arguments(given)
    torch.set_num_threads(1)
    # Every rank would import it first; it takes longer than a cell may.
    preload(["deepspeed"])
    began = time.monotonic()
    try:
        some = chosen.strategy, chosen.ranks, chosen.action, chosen.moment
        verdicts = fill(cells(*some) if any(some) or chosen.all else spread(), chosen.wrong)
    finally:
        close_pools()
    text = summary(verdicts, time.monotonic() - began)
    if chosen.write is not None:
        write_table(chosen.write, "semantics table", f"{table(verdicts)}\n\n{text}")
    print(f"{table(verdicts)}\n\n{text}\n\n{sentences(verdicts)}")
    return 1 if any(each.word == WRONG for each in verdicts.values()) else 0


if __name__ == "__main__":
    # Ranks find a function by the name of its module, which is not that of a program.
    import semantics

    sys.exit(semantics.main())
