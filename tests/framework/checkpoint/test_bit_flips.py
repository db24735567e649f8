"""A few of the flips of ``tests/bit_flips.py``."""

from __future__ import annotations

from pathlib import Path

from bit_flips import flip, saved


def test_no_flipped_bit_of_what_two_ranks_wrote_is_accepted(tmp_path: Path) -> None:
    done, taken = flip(saved(tmp_path), 150, seed=1)
    assert taken == []
    assert len(done) >= 5
