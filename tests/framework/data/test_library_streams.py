"""Streams of Hugging Face ``datasets`` and WebDataset: after a resume exactly the samples that were not seen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
from library_streams import (
    COUNT,
    Make,
    hugging_face,
    in_turn,
    interrupted,
    kept_state,
    loader,
    numbers_of,
    prepare_libraries,
    read,
    resumed,
    seen_after,
    source,
    split_by_node,
    web_dataset,
)

from phalanx.framework.data.epochs import pass_epoch_to

STREAMS = ("generator", "json", "parquet", "json+shuffled", "tar", "tar+shuffled")


def maker(root: Path, kind: str, workers: int) -> Make:
    def make(rank: int, size: int) -> Any:
        if kind.startswith("tar"):
            return loader(web_dataset(root, kind.endswith("shuffled")), workers)
        return loader(hugging_face(root, kind), workers)

    return make


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prepare_libraries()
    return tmp_path_factory.mktemp("shards")


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 0) for kind in STREAMS), ("json+shuffled", 2), ("tar", 2)])
def test_a_resumed_stream_continues_at_the_same_batch_on_any_number_of_ranks(
    root: Path, kind: str, workers: int
) -> None:
    make = maker(root, kind, workers)
    whole = read(source(make, 0, 1), 1)
    assert sorted(chain(*whole)) == list(range(COUNT))
    cases = [(1, 0), (1, 5), (2, 3), (2, 7)] if workers == 0 else [(2, 3)]
    for ranks, steps in cases:
        position, states = interrupted([source(make, rank, ranks) for rank in range(ranks)], 1, steps)
        assert kept_state(states) == (workers == 0 and kind in ("generator", "json", "parquet"))
        for others in (1, 2, 3) if workers == 0 else (2, 1):
            rows, notes = resumed(make, others, 1, position, states)
            assert in_turn(rows) == whole[ranks * steps :]
            assert notes == []


@pytest.mark.parametrize("kind", ["json", "json+shuffled", "tar+shuffled"])
def test_the_epoch_after_a_resume_is_that_of_an_undisturbed_run(root: Path, kind: str) -> None:
    make = maker(root, kind, 0)
    undisturbed = source(make, 0, 1)
    wanted = [read(undisturbed, epoch) for epoch in range(3)]
    assert wanted[1] != wanted[2]
    position, states = interrupted([source(make, 0, 1)], 1, 4)
    again = source(make, 0, 1)
    again.restore(states, True)
    assert [read(again, 1, position), read(again, 2)] == [wanted[1][4:], wanted[2]]


def test_other_workers_change_the_order_and_are_reported(root: Path) -> None:
    position, states = interrupted([source(maker(root, "json", 0), 0, 1)], 0, 3)
    rows, [note] = resumed(maker(root, "json", 2), 1, 0, position, states)
    assert "num_workers=1, and this one has num_workers=2" in note
    assert numbers_of(rows) != list(range(6, COUNT))


def test_a_shuffle_without_a_seed_is_reported(root: Path) -> None:
    import webdataset

    orders = count()

    def make(rank: int, size: int) -> Any:
        # As without a seed each loader has another order, but never by chance the same first batch.
        shuffled = webdataset.shuffle(100, initial=100, rng=random.Random(next(orders)))
        return loader(web_dataset(root, False).compose(shuffled))

    position, states = interrupted([source(make, 0, 1)], 0, 3)
    _, [note] = resumed(make, 1, 0, position, states)
    assert "give its shuffling a seed" in note


@pytest.mark.parametrize(("kind", "ranks"), [("json", 3), ("json+shuffled", 2)])
def test_a_dataset_split_by_node_continues_on_the_same_number_of_ranks(root: Path, kind: str, ranks: int) -> None:
    # Two ranks take two of the four shards each; three ranks take every third sample.
    def make(rank: int, size: int) -> Any:
        return loader(split_by_node(root, kind, rank, size))

    whole = [read(source(make, rank, ranks, shard=False), 0) for rank in range(ranks)]
    assert numbers_of(whole) == list(range(COUNT))
    position, states = interrupted([source(make, rank, ranks, shard=False) for rank in range(ranks)], 0, 3)
    rows, notes = resumed(make, ranks, 0, position, states, shard=False)
    assert rows == [row[3:] for row in whole]
    assert notes == []


# The dataset has four shards. A number of ranks that divides theirs splits it by shard, others by sample.
@pytest.mark.parametrize(("ranks", "others", "continues"), [(3, 1, True), (3, 6, True), (2, 1, False), (2, 4, False)])
def test_a_dataset_split_by_sample_alone_continues_on_another_number_of_ranks(
    root: Path, ranks: int, others: int, continues: bool
) -> None:
    def make(rank: int, size: int) -> Any:
        return loader(split_by_node(root, "json", rank, size))

    whole = [read(source(make, rank, ranks, shard=False), 0) for rank in range(ranks)]
    position, states = interrupted([source(make, rank, ranks, shard=False) for rank in range(ranks)], 0, 2)
    rows, [note] = resumed(make, others, 0, position, states, shard=False)
    assert "the number of ranks has changed" in note
    assert (sorted(numbers_of(rows) + seen_after(2, whole)) == list(range(COUNT))) is continues


class Dividing:
    """A loader that divides the samples which no rank has seen over the present ranks, as those of MosaicML streaming
    and litdata do."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.before = self.read = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.read = 0
        for number in range(self.before + self.rank, COUNT, self.size):
            self.read += 1
            yield [number]
        self.before = self.read = 0

    def __len__(self) -> int:
        return -(-COUNT // self.size)

    def state_dict(self) -> dict[str, Any]:
        return {"dataset": {"sample_in_epoch": self.before + self.read * self.size}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.before = state["dataset"]["sample_in_epoch"]


@pytest.mark.parametrize("others", [1, 3, 4])
def test_a_loader_that_counts_the_samples_of_all_ranks_continues_on_any_number_of_them(others: int) -> None:
    position, states = interrupted([source(Dividing, rank, 2, shard=False) for rank in range(2)], 0, 3)
    rows, notes = resumed(Dividing, others, 0, position, states, shard=False)
    assert in_turn(rows) == [[number] for number in range(6, COUNT)]
    assert notes == []

    again = [source(Dividing, rank, others, shard=False) for rank in range(others)]
    for given in again:
        given.restore(states, False)
        batches = given.start(0, position)
        next(batches)
    # Six samples are not a multiple of four: the rounds of the epoch that have begun count.
    rounds = -(-6 // others) + 1
    states, position = [given.state_after(rounds) for given in again], again[0].position_after(rounds)
    assert kept_state(states)
    rows, notes = resumed(Dividing, 2, 0, position, states, shard=False)
    assert in_turn(rows) == [[number] for number in range(6 + others, COUNT)]
    assert notes == []


def test_the_stages_of_a_pipeline_get_the_epoch(root: Path) -> None:
    import webdataset

    data = web_dataset(root, True)
    inner = webdataset.WebLoader(data, batch_size=None)
    for given in (loader(data), inner):
        pass_epoch_to(given, 7)
        assert [stage.epoch for stage in data.pipeline if hasattr(stage, "epoch")] == [6, 6]
        pass_epoch_to(given, 0)
        assert [stage.epoch for stage in data.pipeline if hasattr(stage, "epoch")] == [-1, -1]


class Counting:
    """A loader whose state at the end of an epoch is that of an empty rest, as that of MosaicML streaming."""

    def __init__(self) -> None:
        self.epoch = self.read = 0

    def __iter__(self) -> Iterator[list[int]]:
        first, self.read = self.read, 0
        for number in range(first, 4):
            self.read = number + 1
            yield [10 * self.epoch + number]
        self.epoch, self.read = self.epoch + 1, 0

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch - (self.read == 0), "read": self.read or 4}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.read = state["epoch"], state["read"]


class CountingOn(Counting):
    """A loader whose state at the end of an epoch is that of the next one, as that of litdata."""

    def load_state_dict(self, state: dict[str, int]) -> None:
        is_over = state["read"] == 4
        self.epoch, self.read = state["epoch"] + is_over, 0 if is_over else state["read"]


@pytest.mark.parametrize("kind", [Counting, CountingOn])
@pytest.mark.parametrize("steps", [None, 3, 4])
def test_a_loader_restored_at_the_end_of_an_epoch_begins_the_next_one(kind: type[Counting], steps: int | None) -> None:
    def make(rank: int, size: int) -> Any:
        return kind()

    former = source(make, 0, 1)
    wanted = [read(former, 0), read(former, 1)]
    if steps is None:
        again = source(make, 0, 1)
        read(again, 0)
        states = [again.state_after(None)]
        position = None
    else:
        position, states = interrupted([source(make, 0, 1)], 0, steps)
    resumed_source = source(make, 0, 1)
    resumed_source.restore(states, True)
    if steps is not None:
        assert read(resumed_source, 0, position) == wanted[0][steps:]
    assert read(resumed_source, 1) == wanted[1]
