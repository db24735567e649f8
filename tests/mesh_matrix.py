"""The matrix of meshes: saved on any mesh, resumed on any other, the losses are those of plain torch.

    python tests/mesh_matrix.py                            every cell, as a table
    python tests/mesh_matrix.py --rows "fsdp tp=2@2"       saved on this mesh alone
    python tests/mesh_matrix.py --write docs/...           and into a page, between its two marks

A row trains the model of ``mesh_table.py`` for 6 optimizer steps in fp32 with clipping and uneven numbers of tokens,
and saves after the third. A cell resumes from that checkpoint and trains the other 3. On the diagonal, losses and
weights are compared bit by bit with those of the row, which went on.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from marked_pages import write_table
from mesh_table import EXPERTS, LARGE_BATCH, MESHES, Mesh, Outcome, deviation, outcomes
from ranks import close_pools
from resume_matrix import Cell, summary, table

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
# DeepSpeed keeps memory of every engine that a process has had.
_CELLS_OF_A_PROCESS = 60


def are_equal(found: Sequence[Outcome], whole: Sequence[Outcome]) -> bool:
    """Whether ranks have seen the losses of the rest of a run, and have its weights, bit by bit."""
    return all(
        one.sums == other.sums[SAVED * WINDOW :]
        and one.weights.keys() == other.weights.keys()
        and all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())
        for one, other in zip(found, whole, strict=True)
    )


def fill(rows: Sequence[Mesh], columns: Sequence[Mesh], folder: str) -> dict[tuple[Mesh, Mesh], Cell]:
    """Train every row, and resume each on every column."""
    saved: dict[Mesh, tuple[str, list[Outcome]]] = {}
    for mesh in rows:
        path = f"{folder}/{mesh}.ckpt"
        saved[mesh] = path, outcomes(mesh, WINDOW, STEPS, saves=path)
        print(f"{deviation(saved[mesh][1], WINDOW, 0, STEPS, mesh):.1e}  {mesh}, not interrupted", flush=True)
    cells: dict[tuple[Mesh, Mesh], Cell] = {}
    for column in columns:
        for row, (path, whole) in saved.items():
            if len(cells) % _CELLS_OF_A_PROCESS == 0:
                close_pools()
            found = outcomes(column, WINDOW, STEPS, resume=path)
            cells[row, column] = Cell(
                deviation(found, WINDOW, SAVED, STEPS, row), row == column and are_equal(found, whole)
            )
            print(f"{cells[row, column].deviation:.1e}  {row} -> {column}", flush=True)
    return {(row, column): cells[row, column] for row in rows for column in columns}


def main() -> int:
    """Print the table; return 1 if a cell fails."""
    names = list(dict.fromkeys(str(mesh) for mesh in (*LAYOUTS, *WITH_EXPERTS)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="a page whose part between the marks becomes the table")
    parser.add_argument("--rows", action="append", choices=names, help="saved on this alone; may be repeated")
    parser.add_argument("--only", action="append", choices=names, help="resumed on this alone; may be repeated")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    texts, failed = [], []
    try:
        for layouts in (LAYOUTS, WITH_EXPERTS):
            began = time.monotonic()
            rows, columns = (
                [mesh for mesh in layouts if not wanted or str(mesh) in wanted] for wanted in (chosen.rows, chosen.only)
            )
            with tempfile.TemporaryDirectory() as folder:
                cells = fill(rows, columns, folder)
            if cells:
                texts.append(f"{table(cells)}\n\n{summary(cells, time.monotonic() - began)}")
            failed += [(key, cell) for key, cell in cells.items() if cell.fails(key[0] == key[1])]
    finally:
        close_pools()
    text = "\n\nA model with experts:\n\n".join(texts)
    print(text)
    if chosen.write is not None:
        write_table(chosen.write, "mesh matrix", text)
    for (row, column), cell in failed:
        print(f"failed: {row} -> {column}: {cell}")
    return 1 if failed else 0


if __name__ == "__main__":
    # Ranks find a function by the name of its module, which is not that of a program.
    import mesh_matrix

    sys.exit(mesh_matrix.main())
