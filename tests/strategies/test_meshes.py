"""Meshes: the losses of plain torch, and checkpoints that go from one to another; the table is ``mesh_table.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mesh_table import TOLERANCE, Mesh, deviation, outcomes

STEPS = 6
SHARED = [
    Mesh("ddp", 2, "cp=2"),
    Mesh("fsdp", 2, "cp=2"),
    Mesh("ddp", 2, "tp=2"),
    Mesh("pipeline", 4, "pp=2,dp_shard=2"),
    Mesh("pipeline", 4, "pp=2,tp=2"),
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
    ],
    ids=str,
)
def test_a_checkpoint_goes_to_another_mesh(saved: Mesh, resumed: Mesh, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    outcomes(saved, 1, STEPS, saves=path)
    assert deviation(outcomes(resumed, 1, STEPS, resume=path), 1, STEPS // 2, STEPS) <= TOLERANCE
