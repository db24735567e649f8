"""The parity table: every strategy trains the same small transformer as one process of plain torch.

    python tests/parity_table.py                    every cell, as a table
    python tests/parity_table.py --write docs/...   and into a page, between its two marks

A cell trains some optimizer steps, 20 in the table, on the same global batches of 8 rows and compares the loss of each
step.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from language_model import LanguageModel, adamw, token_loader, tokens
from marked_pages import write_table
from models import plain_steps, silent_trainer, step_means, windows_of
from ranks import close_pools, run_on_ranks
from torch import Tensor

import phalanx.strategies
from phalanx import AccumulationSchedule
from phalanx.framework.core.degrees import Degrees
from phalanx.precisions.float8 import quiet_import

STEPS, GLOBAL_BATCH, CLIP = 20, 8, 0.5
ROWS = 8 * GLOBAL_BATCH * STEPS
PRECISIONS = {"32-true": 1e-5, "bf16-mixed": 2e-2, "fp8-mixed": 2e-2}
"""How far a step's loss may be from plain torch's, relative."""
WINDOWS: dict[str, tuple[int, ...]] = {"1": (1,), "4": (4,), "1,2,3,1,4,2": (1, 2, 3, 1, 4, 2)}
HEADINGS = {
    "1": "1 micro-batch",
    "4": "4 micro-batches",
    "1,2,3,1,4,2": "1, 2, 3, 1, 4 and 2 micro-batches in turn",
}
# How many ranks each trains on, and on how many different parts of a global batch.
STRATEGIES = {
    "single": (1, 1),
    "ddp": (2, 2),
    "fsdp": (2, 2),
    "hsdp": (4, 4),
    "fsdp-offload": (2, 2),
    "zero1": (2, 2),
    "zero2": (2, 2),
    "zero3": (2, 2),
    "zero2-offload": (2, 2),
    "zero3-offload": (2, 2),
    "zero3-nvme": (2, 2),
    "ddp+tp": (4, 2),
    "fsdp+tp": (4, 2),
}


@dataclass(frozen=True)
class Cell:
    """One way of training."""

    strategy: str
    precision: str
    windows: str
    clips: bool
    steps: int = STEPS

    @property
    def batches(self) -> list[int]:
        """The number of global batches of each optimizer step."""
        windows = WINDOWS[self.windows]
        return [windows[step % len(windows)] for step in range(self.steps)]


# The others refuse it.
IN_FP8 = ("single", "ddp", "fsdp", "hsdp", "fsdp-offload")
CELLS = [
    Cell(strategy, precision, windows, clips)
    for strategy, precision, windows, clips in itertools.product(STRATEGIES, PRECISIONS, WINDOWS, (False, True))
    if precision != "fp8-mixed" or strategy in IN_FP8
]


def by_hand(precision: str, batches: Sequence[int], clip: float | None) -> list[float]:
    """Train in one process with plain torch; return the loss of each optimizer step.

    ``batches``: the number of global batches of each step.
    """
    module, data = LanguageModel(), tokens(ROWS)
    if precision == "fp8-mixed":
        converted_by_hand(module)

    def loss_of(rows: slice) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
            return module.loss(data[rows])

    return plain_steps(adamw(module, module.lr), loss_of, windows_of(GLOBAL_BATCH, batches, len(batches)), clip)


def converted_by_hand(module: LanguageModel) -> None:
    """Convert the layers of the blocks as a user of torchao would, all but the first and the last of the module."""
    with quiet_import():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(pad_inner_dim=True)
    convert_to_float8_training(module, module_filter_fn=lambda _, name: name.startswith("blocks."), config=config)


def strategy_named(name: str, nvme_path: str) -> Any:
    """Return what to hand to a Trainer for a row of the table."""
    if name == "fsdp+tp":
        return phalanx.strategies.FSDPStrategy(tensor_parallel=2)
    if name == "ddp+tp":
        return phalanx.strategies.DDPStrategy().with_degrees(Degrees(tp=2))
    if name == "zero3-nvme":
        return phalanx.strategies.DeepSpeedStrategy(
            stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path=nvme_path
        )
    return name


def trained(cell: Cell, nvme_path: str) -> list[float]:
    """Train through a Trainer; return the losses of this rank's micro-batches."""
    ranks, parts = STRATEGIES[cell.strategy]
    windows = WINDOWS[cell.windows]
    module = LanguageModel()
    trainer = silent_trainer(
        strategy=strategy_named(cell.strategy, nvme_path),
        devices=ranks,
        precision=cell.precision,
        max_steps=cell.steps,
        accumulate_grad_batches=AccumulationSchedule.cycle(windows) if len(windows) > 1 else windows[0],
        gradient_clip_val=CLIP if cell.clips else None,
    )
    trainer.fit(module, token_loader(ROWS, GLOBAL_BATCH // parts))
    assert trainer.global_step == cell.steps
    return module.losses


@cache
def expected(precision: str, batches: tuple[int, ...], clips: bool) -> list[float]:
    """Return what plain torch gives."""
    return by_hand(precision, batches, CLIP if clips else None)


def losses_of(cell: Cell) -> list[float]:
    """Return the loss of each optimizer step of a cell, the mean over ranks and micro-batches."""
    ranks, _ = STRATEGIES[cell.strategy]
    with tempfile.TemporaryDirectory() as nvme_path:
        if ranks == 1:
            results = [trained(cell, nvme_path)]
        else:
            results = run_on_ranks(ranks, trained, cell, nvme_path, timeout=120.0)
    return step_means(results, cell.batches).tolist()


def deviation(cell: Cell) -> float:
    """Return the largest relative difference of a step's loss to plain torch's."""
    found = torch.tensor(losses_of(cell), dtype=torch.float64)
    wanted = torch.tensor(expected(cell.precision, tuple(cell.batches), cell.clips), dtype=torch.float64)
    return float(((found - wanted).abs() / wanted).max())


def table(deviations: dict[Cell, float]) -> str:
    """Return the deviations as Markdown tables, one for each precision, with a row for each strategy."""
    parts = []
    for precision in dict.fromkeys(cell.precision for cell in deviations):
        cells = {cell: value for cell, value in deviations.items() if cell.precision == precision}
        kinds = list(dict.fromkeys((cell.windows, cell.clips) for cell in cells))
        heads = [f"{HEADINGS[windows]}{', clipping' if clips else ''}" for windows, clips in kinds]
        lines = [f"Largest relative difference of the losses in `{precision}`:", ""]
        lines += ["| strategy | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
        for strategy in dict.fromkeys(cell.strategy for cell in cells):
            values = [cells[Cell(strategy, precision, *kind)] for kind in kinds]
            lines.append(f"| `{strategy}` | " + " | ".join(f"{value:.0e}" for value in values) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def main() -> int:
    """Print the table; return 1 if a cell is beyond its tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page whose part between the marks becomes the table")
    parser.add_argument("--only", action="append", choices=STRATEGIES, help="this strategy alone; may be repeated")
    parser.add_argument("--precision", choices=PRECISIONS, help="this precision alone")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    deviations: dict[Cell, float] = {}
    try:
        for cell in CELLS:
            wanted = not chosen.only or cell.strategy in chosen.only
            if wanted and chosen.precision in (None, cell.precision):
                deviations[cell] = deviation(cell)
                print(f"{deviations[cell]:.1e}  {cell}", flush=True)
    finally:
        close_pools()
    text = table(deviations)
    print(text)
    if chosen.write is not None and chosen.precision is None:
        write_table(chosen.write, "parity table", text)
    beyond = [cell for cell, value in deviations.items() if not value <= PRECISIONS[cell.precision]]
    for cell in beyond:
        print(f"beyond {PRECISIONS[cell.precision]:.0e}: {cell}")
    return 1 if beyond else 0


if __name__ == "__main__":
    # Ranks find a function by the name of its module, which is not that of a program.
    import parity_table

    sys.exit(parity_table.main())
