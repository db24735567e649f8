"""The matrix: saved under any strategy, resumed under any other, the losses are those of a run that nobody stopped.

    python tests/resume_matrix.py                          every cell, as a table
    python tests/resume_matrix.py --rows zero3@2 --only fsdp@2 --only single@1
    python tests/resume_matrix.py --write docs/...         and into a page, between its two marks

A row trains 9 optimizer steps of a small transformer with tied embeddings, two parameter groups, a schedule,
accumulation and clipping, in fp32, and saves after the fourth, in the middle of an epoch. A cell resumes from that
checkpoint and trains the other 5, whose losses are compared with those of plain torch written by hand. On the diagonal,
losses and weights are compared bit by bit with those of the row, which went on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from language_model import LanguageModel, adamw, token_loader, tokens
from marked_pages import write_table
from models import plain_steps, silent_trainer
from parity_table import strategy_named
from ranks import close_pools, run_on_ranks

from phalanx import Trainer
from phalanx.callbacks import LambdaCallback

SAVED, STEPS = 4, 9
# Divides into parts for 1, 2, 3 and 4 ranks.
GLOBAL_BATCH, WINDOW, CLIP = 12, 2, 0.5
EPOCH = 12
ROWS = GLOBAL_BATCH * WINDOW * EPOCH
TOLERANCE = 1e-5
"""How far a loss may be from plain torch's, relative."""
# DeepSpeed keeps memory of every engine that a process has had.
_CELLS_OF_A_PROCESS = 60


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of ranks, ``parts`` of which see different data."""

    strategy: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.strategy}@{self.ranks}"

    @property
    def parts(self) -> int:
        """Into how many parts a global batch is divided."""
        return self.ranks // 2 if self.strategy.endswith("+tp") else self.ranks


_ANY_SIZE = (
    *("ddp", "fsdp", "zero1", "zero2", "zero3"),
    *("zero1-offload", "zero2-offload", "zero3-offload", "zero3-nvme"),
)
# One process alone is `single`; two replicas and tensor parallelism take two ranks at least.
LAYOUTS = [
    Layout("single", 1),
    *(Layout(name, ranks) for name in _ANY_SIZE[:2] for ranks in (1, 2)),
    Layout("hsdp", 2),
    Layout("ddp+tp", 2),
    Layout("fsdp+tp", 2),
    Layout("fsdp-offload", 2),
    *(Layout(name, ranks) for name in _ANY_SIZE[2:] for ranks in (1, 2)),
]


class Scheduled(LanguageModel):
    """The transformer with a learning rate that changes in every step."""

    def configure_optimizers(self) -> Any:
        optimizer = adamw(self, self.lr)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def rate_of(step: int) -> float:
    """Return the factor of the learning rate."""
    return (1.0 + step) / 4 if step < 3 else 0.9 ** (step - 3)


@dataclass
class Outcome:
    """What a rank has seen: the loss of each micro-batch, and the weights at the end where it has them."""

    losses: list[float]
    weights: dict[str, torch.Tensor] | None

    def equals(self, other: Outcome) -> bool:
        """Whether losses and weights are the same bit by bit."""
        if self.losses != other.losses or (self.weights is None) is not (other.weights is None):
            return False
        mine, theirs = self.weights or {}, other.weights or {}
        return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def trained(layout: Layout, folder: str, stop: int, resume: str | None, saves: Mapping[int, str]) -> Outcome:
    """Train up to a step, from a checkpoint, and save after some. Runs on each rank."""

    def save(trainer: Trainer, *_: Any) -> None:
        # After every micro-batch: those that end no window leave the count as it is.
        path = saves.get(trainer.global_step)
        if path is not None and not Path(path).exists():
            trainer.save_checkpoint(path)

    module = Scheduled()
    trainer = silent_trainer(
        strategy=strategy_named(layout.strategy, folder),
        devices=layout.ranks,
        max_steps=stop,
        accumulate_grad_batches=WINDOW,
        gradient_clip_val=CLIP,
        callbacks=[LambdaCallback(on_train_batch_end=save)],
        default_root_dir=folder,
    )
    trainer.fit(module, token_loader(ROWS, GLOBAL_BATCH // layout.parts), ckpt_path=resume)
    assert trainer.global_step == stop
    state = module.state_dict()
    here = not any(tensor.is_meta for tensor in state.values())
    return Outcome(module.losses, {name: tensor.clone() for name, tensor in state.items()} if here else None)


def outcomes(layout: Layout, folder: Path, stop: int, resume: Path | None, saves: Mapping[int, Path]) -> list[Outcome]:
    """Train on ranks of their own; return what each has seen."""
    given = (str(folder), stop, str(resume) if resume else None, {step: str(path) for step, path in saves.items()})
    return run_on_ranks(layout.ranks, trained, layout, *given, timeout=120.0)


def losses_of(found: Sequence[Outcome]) -> torch.Tensor:
    """Return the loss of each optimizer step: the mean over ranks and micro-batches."""
    rows = torch.tensor([outcome.losses for outcome in found], dtype=torch.float64).mean(0)
    return rows.view(-1, WINDOW).mean(1)


@cache
def uninterrupted() -> torch.Tensor:
    """Train an epoch in one process with plain torch; return the loss of each optimizer step."""
    module, rows = LanguageModel(), tokens(ROWS)
    optimizer = adamw(module, module.lr)
    rates = [group["lr"] for group in optimizer.param_groups]

    def batches() -> Iterator[torch.Tensor]:
        for step, batch in enumerate(rows.split(GLOBAL_BATCH * WINDOW)):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * rate_of(step)
            yield batch

    losses = plain_steps(optimizer, module.loss, batches(), CLIP)
    return torch.tensor(losses, dtype=torch.float64)


def deviation(found: Sequence[Outcome], first: int) -> float:
    """Return the largest relative difference of a step's loss, from step ``first`` on, to plain torch's."""
    losses = losses_of(found)
    wanted = uninterrupted()[first:][: len(losses)]
    assert len(losses) == len(wanted)
    return float(((losses - wanted).abs() / wanted).max())


@dataclass
class Row:
    """A run that saved and went on."""

    checkpoint: Path
    whole: list[Outcome]
    deviation: float

    def rest(self) -> list[Outcome]:
        """Return what it saw after it saved."""
        return [Outcome(outcome.losses[SAVED * WINDOW :], outcome.weights) for outcome in self.whole]


def row_of(layout: Layout, folder: Path, steps: int = STEPS) -> Row:
    """Train a row's run."""
    checkpoint = folder / f"{layout}.ckpt"
    whole = outcomes(layout, folder, steps, None, {SAVED: checkpoint})
    return Row(checkpoint, whole, deviation(whole, 0))


def resumed(layout: Layout, folder: Path, row: Row, steps: int = STEPS) -> list[Outcome]:
    """Resume from a row's checkpoint and train to the end."""
    return outcomes(layout, folder, steps, row.checkpoint, {})


@dataclass(frozen=True)
class Cell:
    """What resuming came to: how far from plain torch, and whether equal to the row bit by bit."""

    deviation: float
    equal: bool

    def fails(self, diagonal: bool) -> bool:
        """Whether it is not what it has to be."""
        return not self.deviation <= TOLERANCE or (diagonal and not self.equal)


Cells = dict[tuple[Any, Any], Cell]


def table(cells: Cells) -> str:
    """Return the cells as a Markdown table."""
    rows, columns = (list(dict.fromkeys(key[place] for key in cells)) for place in (0, 1))
    lines = ["| saved under \\ resumed under | " + " | ".join(map(str, columns)) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for row in rows:
        shown = [_shown(cells.get((row, column)), row == column) for column in columns]
        lines.append(f"| `{row}` | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _shown(cell: Cell | None, diagonal: bool) -> str:
    if cell is None:
        return ""
    return "**=**" if diagonal and cell.equal else f"{cell.deviation:.0e}"


def summary(cells: Cells, seconds: float) -> str:
    """Return the extremes in sentences."""
    (row, column), worst = max(cells.items(), key=lambda item: item[1].deviation)
    diagonal = [cell.equal for (row, column), cell in cells.items() if row == column]
    text = (
        f"The {len(cells)} resumed runs took {seconds / 60:.0f} min. The largest relative difference from a loss in "
        f"plain PyTorch is {worst.deviation:.1e}, for a run that was saved under `{row}` and resumed under `{column}`. "
        f"On the diagonal, {sum(diagonal)} of {len(diagonal)} runs are bit-identical to the uninterrupted run."
    )
    return textwrap.fill(text, 120, break_on_hyphens=False)


Save = Callable[[Any, Path], tuple[Any, float]]
"""Trains a row in a folder; returns its run and how far it is from plain torch."""
Resume = Callable[[Any, Any, Any, Path], Cell]
"""Resumes the run of a row, given the row, its run, a column and a folder."""


def fill(rows: Sequence[Any], columns: Sequence[Any], folder: Path, save: Save, resume: Resume) -> Cells:
    """Train every row, and resume each under every column."""
    saved: dict[Any, Any] = {}
    for row in rows:
        saved[row], off = save(row, folder)
        print(f"{off:.1e}  {row}, not interrupted", flush=True)
    cells: Cells = {}
    for column in columns:
        for row, run in saved.items():
            if len(cells) % _CELLS_OF_A_PROCESS == 0:
                close_pools()
            cells[row, column] = cell = resume(row, run, column, folder)
            print(f"{cell.deviation:.1e}  {row} -> {column}{', equal' if cell.equal else ''}", flush=True)
    return {(row, column): cells[row, column] for row in rows for column in columns}


def print_matrix(doc: str | None, mark: str, groups: Mapping[str, Sequence[Any]], save: Save, resume: Resume) -> int:
    """Print the matrix of each group of layouts below its title; return 1 if a cell fails.

    Args:
        doc: the description of the program.
        mark: the name of the marks in the page that ``--write`` names.
        groups: layouts by the text above their matrix.
        save: trains a row.
        resume: fills a cell.
    """
    names = list(dict.fromkeys(str(layout) for layouts in groups.values() for layout in layouts))
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page whose part between the marks becomes the table")
    parser.add_argument("--rows", action="append", choices=names, help="saved under this alone; may be repeated")
    parser.add_argument("--only", action="append", choices=names, help="resumed under this alone; may be repeated")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    text, failed = "", []
    try:
        for title, layouts in groups.items():
            began = time.monotonic()
            rows, columns = (
                [each for each in layouts if not wanted or str(each) in wanted] for wanted in (chosen.rows, chosen.only)
            )
            with tempfile.TemporaryDirectory() as folder:
                cells = fill(rows, columns, Path(folder), save, resume)
            if cells:
                text += f"{title}{table(cells)}\n\n{summary(cells, time.monotonic() - began)}"
            failed += [(key, cell) for key, cell in cells.items() if cell.fails(key[0] == key[1])]
    finally:
        close_pools()
    print(text)
    if chosen.write is not None:
        write_table(chosen.write, mark, text)
    for (row, column), cell in failed:
        print(f"failed: {row} -> {column}: {cell}")
    return 1 if failed else 0


def saved_row(layout: Layout, folder: Path) -> tuple[Row, float]:
    """Train a row's run, as a matrix needs it."""
    row = row_of(layout, folder)
    return row, row.deviation


def resumed_cell(row: Layout, run: Row, column: Layout, folder: Path) -> Cell:
    """Fill a cell."""
    found = resumed(column, folder, run)
    equal = row == column and all(a.equals(b) for a, b in zip(found, run.rest(), strict=True))
    return Cell(deviation(found, SAVED), equal)


def main() -> int:
    """Print the matrix; return 1 if a cell fails."""
    return print_matrix(__doc__, "resume matrix", {"": LAYOUTS}, saved_row, resumed_cell)


if __name__ == "__main__":
    # Ranks find a function by the name of its module, which is not that of a program.
    import resume_matrix

    sys.exit(resume_matrix.main())
