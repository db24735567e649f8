"""What programs do means the same under every strategy; the whole table is ``make semantics``."""

from __future__ import annotations

import pytest
from semantic_cells import REFUSED, RIGHT, WRONG, Cell, Layout, tried

# What a rank imports first is part of the time of its first cell.
SECONDS = 60.0


def cell(action: str, moment: str, strategy: str, ranks: int = 2) -> Cell:
    return Cell(action, moment, Layout(strategy, ranks))


@pytest.mark.parametrize(
    ("strategy", "word", "what"),
    [
        ("phalanx.strategies:DDPStrategy", RIGHT, ""),
        ("odd_strategies:Refusing", REFUSED, "use 'ddp'"),
        ("odd_strategies:Silent", WRONG, "no way out"),
        ("odd_strategies:Forgetful", WRONG, "off"),
        ("odd_strategies:Failing", WRONG, "size of tensor"),
        ("odd_strategies:Crashing", WRONG, "crash: exit code 7"),
    ],
)
def test_a_strategy_of_another_package_is_judged(strategy: str, word: str, what: str) -> None:
    verdict = tried(cell("`clamp_` of all", "on_train_batch_end", strategy), SECONDS)
    assert verdict.word == word, verdict
    assert what in verdict.what


def test_ranks_that_wait_are_wrong() -> None:
    verdict = tried(cell("`clamp_` of all", "on_train_batch_end", "odd_strategies:Waiting"), 3.0)
    assert (verdict.word, "hang" in verdict.what) == (WRONG, True)
