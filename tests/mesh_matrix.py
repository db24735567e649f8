"""The matrix of meshes: saved on any mesh, resumed on any other, the losses are those of plain torch.

    python tests/mesh_matrix.py                            every cell, as a table
    python tests/mesh_matrix.py --rows "fsdp tp=2@2"       saved on this mesh alone
    python tests/mesh_matrix.py --write docs/...           and into a page, between its two marks

A row trains the model of ``mesh_table.py`` for 6 optimizer steps in fp32 with clipping and uneven numbers of tokens,
and saves after the third. A cell resumes from that checkpoint and trains the other 3. On the diagonal, losses and
weights are compared bit by bit with those of the row, which went on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from mesh_table import EXPERTS, LARGE_BATCH, MESHES, Mesh, Outcome, deviation, outcomes
from resume_matrix import Cell, print_matrix

STEPS, SAVED, WINDOW = 6, 3, 1
# Eight ranks are left to `mesh_table.py`.
_MESHES = [mesh for mesh in MESHES if mesh.ranks <= 4]
LAYOUTS = [mesh for mesh in _MESHES if not mesh.experts] + [Mesh("fsdp", 2), Mesh("zero2", 2), Mesh("zero3", 2)]
# Their model is another one: it has experts.
WITH_EXPERTS = [
    Mesh("single", 1, "", EXPERTS, LARGE_BATCH),
    *(mesh for mesh in _MESHES if mesh.experts),
    Mesh("ddp", 2, "", EXPERTS, LARGE_BATCH),
    Mesh("fsdp", 2, "", EXPERTS, LARGE_BATCH),
    Mesh("zero3", 2, "", EXPERTS, LARGE_BATCH),
]


def are_equal(found: Sequence[Outcome], whole: Sequence[Outcome]) -> bool:
    """Whether ranks have seen the losses of the rest of a run, and have its weights, bit by bit."""
    return all(
        one.sums == other.sums[SAVED * WINDOW :]
        and one.weights.keys() == other.weights.keys()
        and all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())
        for one, other in zip(found, whole, strict=True)
    )


def saved_row(mesh: Mesh, folder: Path) -> tuple[tuple[str, list[Outcome]], float]:
    """Train a row's run; return its checkpoint and what its ranks have seen, and the deviation."""
    path = f"{folder}/{mesh}.ckpt"
    whole = outcomes(mesh, WINDOW, STEPS, saves=path)
    return (path, whole), deviation(whole, WINDOW, 0, STEPS, mesh)


def resumed_cell(row: Mesh, run: tuple[str, list[Outcome]], column: Mesh, folder: Path) -> Cell:
    """Fill a cell."""
    path, whole = run
    found = outcomes(column, WINDOW, STEPS, resume=path)
    return Cell(deviation(found, WINDOW, SAVED, STEPS, row), row == column and are_equal(found, whole))


def main() -> int:
    """Print both matrices; return 1 if a cell fails."""
    experts = "\n\nThe following table shows the results of resuming a mixture-of-experts (MoE) model:\n\n"
    groups = {"": LAYOUTS, experts: WITH_EXPERTS}
    return print_matrix(__doc__, "mesh matrix", groups, saved_row, resumed_cell)


if __name__ == "__main__":
    # Ranks find a function by the name of its module, which is not that of a program.
    import mesh_matrix

    sys.exit(mesh_matrix.main())
