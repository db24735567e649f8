"""Seeds, and the snapshot of the random generators."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy
import pytest
import torch
from messages import refuses
from ranks import run_on_ranks
from torch import Tensor

from phalanx.framework.core.errors import ConfigurationError
from phalanx.framework.distributed.seed import capture, restore, seed_everything


def draw() -> tuple[float, float, float, float, float]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(numpy.random.rand()),
        float(numpy.random.randn()),
        torch.rand(1).item(),
    )


def as_plain(value: Any) -> Any:
    """Turn tensors into numbers, so that what is not JSON shows."""
    if isinstance(value, Tensor):
        return value.tolist()
    return {key: as_plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def test_a_seed_fixes_every_generator() -> None:
    assert seed_everything(7) == 7
    first = draw()
    seed_everything(7, workers=True)
    assert draw() == first
    seed_everything(8)
    assert draw() != first


def test_without_a_seed_it_is_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert seed_everything() == 0
    assert capsys.readouterr().out == ""
    seed_everything(3, verbose=True)
    assert "3" in capsys.readouterr().out


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "1", True])
def test_a_seed_outside_the_range_is_refused(seed: Any) -> None:
    with refuses(ConfigurationError, "seed="):
        seed_everything(seed)


def seed_and_draw() -> tuple[int, tuple[float, ...]]:
    return seed_everything(11), draw()


def test_all_ranks_have_the_same_seed() -> None:
    first, second = run_on_ranks(2, seed_and_draw)
    assert first == second


@pytest.mark.parametrize("num_draws", [0, 1, 3])
def test_a_snapshot_brings_back_the_next_numbers(num_draws: int) -> None:
    seed_everything(1)
    for _ in range(num_draws):
        # After an odd number of normal draws a generator keeps the second of a pair.
        draw()
    state = capture()
    expected = [draw(), draw()]
    seed_everything(2)
    restore(state)
    assert [draw(), draw()] == expected


def test_a_snapshot_is_tensors_and_json_and_survives_json() -> None:
    seed_everything(5)
    random.gauss(0, 1)
    numpy.random.randn()
    state = capture()
    expected = draw()
    plain = json.loads(json.dumps(as_plain(state)))
    for name in ("python", "numpy"):
        for key, value in state[name].items():
            if not isinstance(value, Tensor):
                state[name][key] = plain[name][key]
    restore(state)
    assert draw() == expected
