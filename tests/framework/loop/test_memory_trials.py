"""A few of the trials of ``memory_trials.py``: fits of which ranks run out of memory at random points."""

from __future__ import annotations

import pytest
from exhausted import FSDP
from memory_run import drawn
from memory_trials import problem_of


@pytest.mark.parametrize("seed", [3, 4, 5])
@pytest.mark.parametrize("strategy", ["ddp", FSDP, "zero2"])
def test_a_fit_continues_with_the_same_losses(strategy: str, seed: int) -> None:
    problem, raised = problem_of(drawn(seed, strategy))

    assert not problem
    assert raised > 0
