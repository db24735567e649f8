"""Meshes: the losses of plain torch, and checkpoints that go from one to another; the table is ``mesh_table.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import pytest
import torch
from mesh_table import TOLERANCE, Mesh, Outcome, deviation, outcomes, trained
from ranks import run_on_ranks
from torch.distributed.tensor import _redistribute

STEPS, WINDOW = 4, 2
Halved = Callable[..., tuple[list[Outcome], str]]


def experts(ranks: int, parallel: str = "", strategy: str = "fsdp") -> Mesh:
    return Mesh(strategy, ranks, parallel, experts=6, batch=16)


TRAINED = [
    Mesh("ddp", 2, "cp=2"),
    Mesh("fsdp", 2, "cp=2"),
    Mesh("ddp", 2, "tp=2"),
    Mesh("fsdp", 4, "cp=2,tp=2"),
    Mesh("pipeline", 4, "pp=2,dp_shard=2"),
    Mesh("pipeline", 4, "pp=2,tp=2"),
    Mesh("pipeline", 4, "pp=2,cp=2"),
    experts(2, "ep=2"),
    experts(2, "ep=2,cp=2"),
    experts(4, "ep=2"),
    experts(4, "ep=2,dp_replicate=2"),
    experts(4, "ep=2,tp=2"),
]
# test_pipeline_sequences.py resumes pipelines.
RESUMED = [
    Mesh("ddp", 2, "cp=2"),
    Mesh("ddp", 2, "tp=2"),
    experts(2, "ep=2"),
]


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Halved:
    """Train on a mesh once for all tests; return what its ranks have seen, and a checkpoint of half of the steps."""

    @cache
    def train(mesh: Mesh) -> tuple[list[Outcome], str]:
        path = str(tmp_path_factory.mktemp("halved") / "half.ckpt")
        return outcomes(mesh, WINDOW, STEPS, saves=path), path

    return train


@pytest.mark.parametrize("mesh", TRAINED, ids=str)
def test_uneven_tokens_accumulation_and_clipping_together(mesh: Mesh, halved: Halved) -> None:
    assert deviation(halved(mesh)[0], WINDOW, 0, STEPS, mesh) <= TOLERANCE


@pytest.mark.parametrize("mesh", RESUMED, ids=str)
def test_a_resumed_run_is_the_same_bit_by_bit(mesh: Mesh, halved: Halved) -> None:
    whole, path = halved(mesh)
    for one, other in zip(whole, outcomes(mesh, WINDOW, STEPS, resume=path), strict=True):
        assert one.sums[WINDOW * STEPS // 2 :] == other.sums
        assert all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        (Mesh("ddp", 2, "cp=2"), Mesh("fsdp", 2, "tp=2")),
        (Mesh("ddp", 2, "tp=2"), Mesh("fsdp", 4, "cp=2")),
        (Mesh("fsdp", 2, "cp=2"), Mesh("pipeline", 4, "pp=2,cp=2")),
        (Mesh("fsdp", 4, "tp=2"), Mesh("fsdp", 2)),
        (Mesh("fsdp", 2), Mesh("fsdp", 4, "tp=2")),
        (Mesh("pipeline", 4, "pp=2,dp_shard=2"), Mesh("fsdp", 2)),
        (Mesh("fsdp", 2), Mesh("pipeline", 4, "pp=2,dp_shard=2")),
        (Mesh("single", 1), Mesh("pipeline", 4, "pp=2,tp=2")),
        (Mesh("pipeline", 4, "pp=2,tp=2"), Mesh("pipeline", 2, "pp=2")),
        (Mesh("pipeline", 4, "pp=2,cp=2"), Mesh("single", 1)),
        (experts(2, "ep=2"), experts(1, strategy="single")),
        (experts(1, strategy="single"), experts(2, "ep=2")),
        (experts(4, "ep=2"), experts(2)),
        (experts(2, "ep=2"), experts(4, "ep=2", strategy="hsdp")),
    ],
    ids=str,
)
def test_a_checkpoint_goes_to_another_mesh(saved: Mesh, resumed: Mesh, halved: Halved) -> None:
    found = outcomes(resumed, WINDOW, STEPS, resume=halved(saved)[1])
    assert deviation(found, WINDOW, STEPS // 2, STEPS, resumed) <= TOLERANCE


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
