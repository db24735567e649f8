"""The table of meshes: every mesh trains the same small model, on uneven numbers of tokens, as plain torch does.

    python tests/mesh_table.py                    every cell, as a table
    python tests/mesh_table.py --write docs/...   and into a page, between its two marks

A cell trains 20 optimizer steps in fp32 with clipping on the same global batches of padded sequences, and compares the
mean loss of the tokens of each step. A checkpoint is saved on one mesh and resumed on another.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from long_sequences import LongModel, by_hand, loader
from marked_pages import write_table
from models import silent_trainer
from ranks import close_pools, run_on_ranks
from torch import Tensor

from phalanx import Trainer
from phalanx.callbacks import LambdaCallback

STEPS, BATCH, CLIP, TOLERANCE = 20, 8, 0.3, 1e-5
# Eight ranks that read different data each have a sequence in every micro-batch of a window of four.
LARGE_BATCH, EXPERTS = 32, 8
WINDOWS = (1, 4)


@dataclass(frozen=True)
class Mesh:
    """A strategy on a number of ranks with degrees, written as the argument ``parallel``."""

    strategy: str
    ranks: int
    parallel: str = ""
    experts: int = 0
    """The number of experts in each block of the model."""
    batch: int = BATCH

    def __str__(self) -> str:
        return f"{self.strategy} {self.parallel}@{self.ranks}".replace(" @", "@")


MESHES = [
    Mesh("single", 1),
    Mesh("ddp", 2, "tp=2"),
    Mesh("ddp", 4, "tp=2"),
    Mesh("fsdp", 2, "tp=2"),
    Mesh("fsdp", 4, "tp=2"),
    Mesh("ddp", 2, "cp=2"),
    Mesh("ddp", 4, "cp=2"),
    Mesh("fsdp", 2, "cp=2"),
    Mesh("fsdp", 4, "cp=2"),
    Mesh("ddp", 4, "cp=2,tp=2"),
    Mesh("fsdp", 4, "cp=2,tp=2"),
    Mesh("pipeline", 2, "pp=2"),
    Mesh("pipeline", 4, "pp=2"),
    Mesh("pipeline", 4, "pp=2,dp_shard=2"),
    Mesh("pipeline", 4, "pp=2,tp=2"),
    Mesh("pipeline", 4, "pp=2,cp=2"),
    Mesh("ddp", 8, "tp=2", batch=LARGE_BATCH),
    Mesh("fsdp", 8, "tp=2", batch=LARGE_BATCH),
    Mesh("ddp", 8, "cp=2", batch=LARGE_BATCH),
    Mesh("fsdp", 8, "cp=2", batch=LARGE_BATCH),
    Mesh("pipeline", 8, "pp=2", batch=LARGE_BATCH),
    Mesh("pipeline", 8, "pp=2,dp_shard=4", batch=LARGE_BATCH),
    Mesh("pipeline", 8, "pp=2,tp=2", batch=LARGE_BATCH),
    Mesh("pipeline", 8, "pp=2,tp=2,dp_shard=2"),
    Mesh("pipeline", 8, "pp=2,cp=2,dp_shard=2"),
    Mesh("pipeline", 8, "pp=2,cp=2,tp=2"),
    Mesh("fsdp", 2, "ep=2", EXPERTS, LARGE_BATCH),
    Mesh("fsdp", 4, "ep=2", EXPERTS, LARGE_BATCH),
    Mesh("fsdp", 8, "ep=2", EXPERTS, LARGE_BATCH),
    Mesh("fsdp", 8, "ep=4", EXPERTS, LARGE_BATCH),
]


@dataclass
class Outcome:
    """The sums of a rank's micro-batches, and its weights at the end where it has them."""

    sums: list[tuple[float, float]]
    weights: dict[str, Tensor]


def trained(mesh: Mesh, window: int, stop: int, resume: str | None = None, saves: str | None = None) -> Outcome:
    """Train up to a step, from a checkpoint, and save in the middle of the way. Runs on each rank."""

    def save(trainer: Trainer, *_: Any) -> None:
        if saves is not None and trainer.global_step == stop // 2 and not Path(saves).exists():
            trainer.save_checkpoint(saves)

    module = LongModel(experts=mesh.experts)
    trainer = silent_trainer(
        strategy=mesh.strategy,
        devices=mesh.ranks,
        parallel=mesh.parallel or None,
        max_steps=stop,
        accumulate_grad_batches=window,
        gradient_clip_val=CLIP,
        callbacks=[LambdaCallback(on_train_batch_end=save)],
        verbose=False,
    )
    share = mesh.batch // window // trainer.fabric.resources.data_size
    trainer.fit(module, loader(share), ckpt_path=resume)
    assert trainer.global_step == stop
    held = not any(parameter.is_meta for parameter in module.parameters())
    weights = {name: each.detach().clone() for name, each in module.named_parameters()} if held else {}
    return Outcome(module.sums, weights)


def outcomes(mesh: Mesh, window: int, stop: int, resume: str | None = None, saves: str | None = None) -> list[Outcome]:
    """Train on the ranks of a mesh; return what each has seen."""
    if mesh.ranks == 1:
        return [trained(mesh, window, stop, resume, saves)]
    return run_on_ranks(mesh.ranks, trained, mesh, window, stop, resume, saves, timeout=120.0)


@cache
def expected(steps: int, batch: int = BATCH, experts: int = 0) -> Tensor:
    """Return the loss of each step of plain torch."""
    return torch.tensor(by_hand(1, CLIP, steps, batch, experts=experts)[0], dtype=torch.float64)


def deviation(found: Sequence[Outcome], window: int, first: int, steps: int, mesh: Mesh | None = None) -> float:
    """Return the largest relative difference of a step's loss to plain torch's, from step ``first`` on.

    The model is that of a mesh, by default one without experts.
    """
    # Under a pipeline only the ranks with the last stage see losses.
    sums = torch.tensor([outcome.sums for outcome in found if outcome.sums], dtype=torch.float64).sum(0)
    parts = sums.view(-1, window, 2).sum(1)
    losses = parts[:, 0] / parts[:, 1]
    wanted = (expected(steps) if mesh is None else expected(steps, mesh.batch, mesh.experts))[first:]
    assert losses.shape == wanted.shape
    return float(((losses - wanted).abs() / wanted).max())


def main() -> int:
    """Print the table; return 1 if a cell is beyond the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page whose part between the marks becomes the table")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    heads = [f"{window} micro-batch{'es' if window > 1 else ''}" for window in WINDOWS]
    heads += ["started on `single`, resumed on the mesh", "started on the mesh, resumed on `single`"]
    lines = ["| mesh | " + " | ".join(heads) + " |", "|---" * 5 + "|"]
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for mesh in MESHES:
            alone = replace(mesh, strategy="single", ranks=1, parallel="")
            own = f"{folder}/single-{mesh.experts}-{mesh.batch}.ckpt"
            if not Path(own).exists():
                outcomes(alone, 1, STEPS, saves=own)
            path = f"{folder}/{mesh}.ckpt"
            values = [
                deviation(outcomes(mesh, each, STEPS, saves=path if each == 1 else None), each, 0, STEPS, mesh)
                for each in WINDOWS
            ]
            values.append(deviation(outcomes(mesh, 1, STEPS, resume=own), 1, STEPS // 2, STEPS, mesh))
            values.append(deviation(outcomes(alone, 1, STEPS, resume=path), 1, STEPS // 2, STEPS, mesh))
            worst = max(worst, *values)
            lines.append(f"| `{mesh}` | " + " | ".join(f"{value:.0e}" for value in values) + " |")
            print(lines[-1], flush=True)
    close_pools()
    text = "\n".join(lines)
    if chosen.write is not None:
        write_table(chosen.write, "mesh table", text)
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    # Ranks find a function by the name of its module, which is not that of a program.
    import mesh_table

    sys.exit(mesh_table.main())
