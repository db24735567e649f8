"""A few of the trials of ``memory_trials.py``: fits of which ranks run out of memory at random points."""

from __future__ import annotations

import pytest
from exhausted import FSDP_RECOVERS
from memory_run import drawn
from memory_trials import problem_of


# test_recovering_step.py has the others: only under zero3 are ranks started again.
@pytest.mark.parametrize(("strategy", "seed"), [pytest.param("fsdp", 4, marks=FSDP_RECOVERS), ("zero3", 1)])
def test_a_fit_continues_with_the_same_losses(strategy: str, seed: int) -> None:
    problem, raised = problem_of(drawn(seed, strategy))

    assert not problem
    assert raised > 0
