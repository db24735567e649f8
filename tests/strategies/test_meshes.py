"""Meshes: the losses of plain torch, and checkpoints that go from one to another; the table is ``mesh_table.py``."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from mesh_table import TOLERANCE, Mesh, deviation, outcomes, trained
from ranks import run_on_ranks
from torch.distributed.tensor import _redistribute

STEPS = 6
SHARED = [
    Mesh("ddp", 2, "cp=2"),
    Mesh("fsdp", 2, "cp=2"),
    Mesh("ddp", 2, "tp=2"),
    Mesh("pipeline", 4, "pp=2,dp_shard=2"),
    Mesh("pipeline", 4, "pp=2,tp=2"),
    Mesh("pipeline", 4, "pp=2,cp=2"),
]


@pytest.mark.parametrize("mesh", [*SHARED, Mesh("fsdp", 4, "cp=2,tp=2")], ids=str)
def test_uneven_tokens_accumulation_and_clipping_together(mesh: Mesh) -> None:
    assert deviation(outcomes(mesh, 4, STEPS), 4, 0, STEPS) <= TOLERANCE


@pytest.mark.parametrize("mesh", SHARED, ids=str)
def test_a_resumed_run_is_the_same_bit_by_bit(mesh: Mesh, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    whole = outcomes(mesh, 1, STEPS, saves=path)
    for one, other in zip(whole, outcomes(mesh, 1, STEPS, resume=path), strict=True):
        assert one.sums[STEPS // 2 :] == other.sums
        assert all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (Mesh("ddp", 2, "cp=2"), Mesh("fsdp", 2, "tp=2")),
        (Mesh("ddp", 2, "tp=2"), Mesh("fsdp", 4, "cp=2")),
        (Mesh("fsdp", 2, "cp=2"), Mesh("single", 1)),
        (Mesh("pipeline", 4, "pp=2,dp_shard=2"), Mesh("fsdp", 2)),
        (Mesh("fsdp", 2), Mesh("pipeline", 4, "pp=2,dp_shard=2")),
        (Mesh("single", 1), Mesh("pipeline", 4, "pp=2,tp=2")),
        (Mesh("pipeline", 4, "pp=2,tp=2"), Mesh("pipeline", 2, "pp=2")),
        (Mesh("pipeline", 4, "pp=2,cp=2"), Mesh("single", 1)),
        (Mesh("fsdp", 2, "cp=2"), Mesh("pipeline", 4, "pp=2,cp=2")),
    ],
    ids=str,
)
def test_a_checkpoint_goes_to_another_mesh(saved: Mesh, resumed: Mesh, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    outcomes(saved, 1, STEPS, saves=path)
    assert deviation(outcomes(resumed, 1, STEPS, resume=path), 1, STEPS // 2, STEPS) <= TOLERANCE


def warned(of: Mesh) -> list[str]:
    """Train and gather the weights; return the warnings of torch about how tensors are gathered."""
    torch_logger = logging.getLogger("torch.distributed.tensor._redistribute")
    messages: list[str] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Noting()
    torch_logger.addHandler(handler)
    # Torch warns once in a process.
    getattr(_redistribute, "_warned_flatten_issues", set[object]()).clear()
    try:
        trained(of, 1, 2)
    finally:
        torch_logger.removeHandler(handler)
    return messages


def test_gathering_full_weights_prints_no_warning() -> None:
    assert run_on_ranks(2, warned, Mesh("fsdp", 2, "tp=2")) == [[], []]
