"""Loaders of MosaicML streaming, litdata and torchdata, which have a state: run by ``make data-libraries``.

They need versions of numpy and transformers that phalanx's other tests do not have, so they are skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import library_streams
import pytest
from killed_streams import killed_and_resumed
from library_streams import BATCH_SIZE, COUNT, Make, in_turn, interrupted, kept_state, read, resumed, source

LIBRARIES: dict[str, tuple[str, Callable[[Path, int], Any]]] = {
    "mosaic": ("streaming", lambda root, workers: library_streams.mosaic(root, False, workers)),
    "mosaic+shuffled": ("streaming", lambda root, workers: library_streams.mosaic(root, True, workers)),
    "litdata": ("litdata", lambda root, workers: library_streams.litdata(root, False, workers)),
    "litdata+shuffled": ("litdata", lambda root, workers: library_streams.litdata(root, True, workers)),
    "torchdata": ("torchdata", lambda root, workers: library_streams.stateful_loader(root, "json", workers)),
}


@pytest.fixture(autouse=True)
def _temporary_files_of_the_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the libraries a folder of the test for the locks and caches that they leave."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def maker(root: Path, kind: str, workers: int) -> Make:
    library, make = LIBRARIES[kind]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: run make data-libraries")
    return lambda rank, size: make(root, workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_loader_with_a_state_continues_at_the_same_batch(tmp_path: Path, kind: str, workers: int) -> None:
    make = maker(tmp_path, kind, workers)
    undisturbed = source(make, 0, 1)
    epochs = [read(undisturbed, epoch) for epoch in range(3)]
    assert sorted(chain(*epochs[1])) == list(range(COUNT))
    for steps in (1, 5, len(epochs[1])):
        former = source(make, 0, 1)
        read(former, 0)
        position, states = interrupted([former], 1, steps)
        assert kept_state(states)
        again = source(make, 0, 1)
        again.restore(states, True)
        assert [read(again, 1, position), read(again, 2)] == [epochs[1][steps:], epochs[2]]


@pytest.mark.parametrize("kind", LIBRARIES)
def test_an_epoch_after_a_checkpoint_between_epochs_is_complete(tmp_path: Path, kind: str) -> None:
    make = maker(tmp_path, kind, 0)
    former = source(make, 0, 1)
    epochs = [read(former, 0)]
    states = [former.state_after(None)]
    epochs.append(read(former, 1))
    again = source(make, 0, 1)
    again.restore(states, True)
    assert read(again, 1) == epochs[1]


def test_a_loader_that_does_not_shard_itself_continues_on_other_ranks(tmp_path: Path) -> None:
    make = maker(tmp_path, "torchdata", 2)
    whole = read(source(make, 0, 1), 0)
    position, states = interrupted([source(make, rank, 2) for rank in range(2)], 0, 3)
    for ranks in (1, 2, 3):
        rows, notes = resumed(make, ranks, 0, position, states)
        assert in_turn(rows) == whole[6:]
        assert notes == []


@pytest.mark.parametrize(("former", "present"), [(0, 2), (2, 0), (2, 3)])
def test_torchdata_refuses_another_number_of_workers(tmp_path: Path, former: int, present: int) -> None:
    position, states = interrupted([source(maker(tmp_path, "torchdata", former), 0, 1)], 0, 3)
    # An assertion of the library itself.
    with pytest.raises(AssertionError):
        resumed(maker(tmp_path, "torchdata", present), 1, 0, position, states)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2)])
@pytest.mark.parametrize("kind", ["mosaic+shuffled", "litdata+shuffled", "torchdata"])
def test_after_a_kill_each_sample_is_seen_once(tmp_path: Path, kind: str, ranks: int, workers: int) -> None:
    before, after = killed(tmp_path, kind, 5, (ranks, workers), (ranks, workers))
    assert sorted(before + after) == list(range(COUNT))


@pytest.mark.parametrize(("first", "second"), [((2, 0), (1, 0)), ((1, 2), (2, 0)), ((2, 2), (1, 0)), ((1, 0), (1, 2))])
@pytest.mark.parametrize("kind", ["mosaic+shuffled", "litdata+shuffled"])
def test_other_ranks_and_workers_continue_where_the_parts_are_even(
    tmp_path: Path, kind: str, first: tuple[int, int], second: tuple[int, int]
) -> None:
    before, after = killed(tmp_path, kind, 5, first, second)
    assert sorted(before + after) == list(range(COUNT))


def test_mosaic_repeats_samples_of_the_rest_until_each_rank_has_as_many(tmp_path: Path) -> None:
    before, after = killed(tmp_path, "mosaic+shuffled", 5, (2, 0), (3, 0))
    rest = set(range(COUNT)) - set(before)
    assert set(after) == rest
    assert len(after) - len(rest) == -len(rest) % 3 == 2


def test_litdata_goes_back_to_a_full_global_batch_of_the_new_ranks(tmp_path: Path) -> None:
    before, after = killed(tmp_path, "litdata+shuffled", 5, (2, 0), (3, 0))
    assert set(before + after) == set(range(COUNT))
    assert len(after) == len(set(after))
    assert len(set(after) & set(before)) == len(before) % (3 * BATCH_SIZE) == 4


def killed(
    root: Path, kind: str, kill: int, first: tuple[int, int], second: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """Return the samples up to the checkpoint of a run that was killed, and those of the run that has resumed it."""
    # Written before the ranks read it.
    maker(root / "shards", kind, 0)(0, 1)
    before, after, _ = killed_and_resumed(root, kind, kill, first, second, env={"TMPDIR": str(root)})
    assert len(before) == kill // 2 * 2 * first[0] * BATCH_SIZE
    return before, after
