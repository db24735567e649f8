"""A checkpoint of any strategy goes on under any other: the losses are those of the run that nobody interrupted.

The whole table is ``make matrix``.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from parity_table import STRATEGIES
from resume_matrix import LAYOUTS, SAVED, TOLERANCE, WINDOW, Layout, deviation, outcomes, resumed, row_of

# Each link of a chain resumes from what the one before saved.
CHAINS = {
    "three ranks": "ddp@3 fsdp@2 zero3@3 single@1 zero1@3 ddp@2 fsdp@3 zero2@2 zero3@1",
    "one and two": "zero3-nvme@2 fsdp+tp@2 zero3-offload@2 ddp+tp@2 hsdp@2 zero1-offload@2 fsdp-offload@2 "
    "zero3-nvme@1 zero2-offload@2 ddp@1",
}
# test_resume_on_three_ranks.py, and test_resume.py and test_save_after_fit.py in framework/resume have the others.
EQUAL = ["fsdp+tp@2", "zero3-nvme@2"]


def layouts(names: str) -> list[Layout]:
    """Return the layouts of a chain."""
    parts = [name.split("@") for name in names.split()]
    return [Layout(strategy, int(ranks)) for strategy, ranks in parts]


def test_every_strategy_is_saved_under_and_resumed_under() -> None:
    pairs = [pair for chain in CHAINS.values() for pair in pairwise(layouts(chain))]
    known = set(STRATEGIES) | {layout.strategy for layout in LAYOUTS}
    last = {layouts(chain)[-1].strategy for chain in CHAINS.values()}
    assert {row.strategy for row, _ in pairs} | last == {column.strategy for _, column in pairs} | {"ddp"} == known


@pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
def test_along_a_chain(chain: str, tmp_path: Path) -> None:
    links, resume = layouts(chain), None
    for number, layout in enumerate(links):
        # One update a link, and so in the middle of an epoch: it takes two to see that the first went right.
        save = tmp_path / f"{number}.ckpt"
        found = outcomes(layout, tmp_path, number + 2, resume, {number + 1: save})
        assert deviation(found, number) <= TOLERANCE, f"{links[number - 1]} -> {layout}"
        resume = save


@pytest.mark.parametrize("name", EQUAL)
def test_on_the_same_layout_it_is_equal_to_the_bit(name: str, tmp_path: Path) -> None:
    (layout,), steps = layouts(name), SAVED + 2
    row = row_of(layout, tmp_path, steps)
    assert row.deviation <= TOLERANCE
    assert len(row.rest()[0].losses) == WINDOW * (steps - SAVED)
    for found, wanted in zip(resumed(layout, tmp_path, row, steps), row.rest(), strict=True):
        assert found.equals(wanted)
