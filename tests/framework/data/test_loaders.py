"""A user's loader, read by one rank of many and from any position."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, cast

import pytest
import torch
from library_streams import read_by_ranks
from messages import refuses
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler

from phalanx.framework.core.errors import CheckpointError, ConfigurationError, DataError
from phalanx.framework.data.combined_source import prepare_evaluation, prepare_evaluations, prepare_training
from phalanx.framework.data.training_source import NO_BATCH, TrainingSource

Sample = Any


class Numbers(Dataset[Sample]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.fetched: list[int] = []
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Sample:
        self.fetched.append(index)
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class Lists(Numbers):
    """A dataset that also takes a list for an index."""

    def __getitem__(self, index: Any) -> Sample:
        return index


class Augmented(Dataset[Sample]):
    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Sample:
        return torch.tensor([index, random.random(), torch.rand(()).item()], dtype=torch.float64)


class Stream(IterableDataset[Sample]):
    def __iter__(self) -> Iterator[Sample]:
        yield from range(10)


def source(loader: Any, rank: int = 0, size: int = 1, **options: Any) -> TrainingSource:
    return prepare_training(loader, rank=rank, size=size, **{"seed": 3, **options})


def values(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else batch


def read(given: TrainingSource, epoch: int = 0, position: dict[str, Any] | None = None) -> list[Any]:
    return [values(batch) for batch in given.start(epoch, position)]


def in_turn(loader: Any, size: int, position: dict[str, Any] | None = None, epoch: int = 0) -> list[Any]:
    """Return the batches of all ranks, in the order of one process."""
    return [values(batch) for batch in read_by_ranks(loader, size, epoch, position)]


def flat(batches: list[Any]) -> list[int]:
    return [sample for batch in batches for sample in batch]


BATCHES = [[k] for k in range(7)]
LOADERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: DataLoader(Numbers(22), batch_size=3),
    "shuffled": lambda: DataLoader(Numbers(22), batch_size=3, shuffle=True),
    "own sampler": lambda: DataLoader(Numbers(22), 3, sampler=RandomSampler(Numbers(22), num_samples=30)),
    "plain indices": lambda: DataLoader(Numbers(22), batch_size=3, sampler=[5, 1, 4, 2, 2]),
    "own batches": lambda: DataLoader(Numbers(22), batch_sampler=[[1, 2], [3], [4, 5, 6], [0, 8], [9]]),
    "batches as samples": lambda: DataLoader(
        Lists(9), batch_size=None, sampler=BatchSampler(range(9), 2, False), collate_fn=list
    ),
    "iterable": lambda: DataLoader(Stream(), batch_size=3),
    "list": lambda: BATCHES,
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("size", [1, 2])
def test_a_resumed_epoch_continues_at_the_same_sample_on_any_number_of_ranks(kind: str, size: int) -> None:
    whole = flat(in_turn(LOADERS[kind](), 1, epoch=2))
    ranks = [source(LOADERS[kind](), rank, size) for rank in range(size)]
    rows = list(zip(*(read(each, 2) for each in ranks), strict=True))
    for consumed in range(len(rows) + 1):
        seen = len(flat([batch for row in rows[:consumed] for batch in row if batch is not NO_BATCH]))
        position = ranks[0].position_after(consumed)
        ((unit, reached),) = position.items()
        for other in (1, 2, 3):
            assert flat(in_turn(LOADERS[kind](), other, position, epoch=2)) == whole[seen:]
            again = source(LOADERS[kind](), 0, other)
            length = again.len_batches(position)
            if length is not None:
                left = len(read(again, 2, position))
                assert again.batches_before(position) + left == length
                assert again.position_after(length)[unit] >= reached


def test_a_resumed_position_counts_on_from_where_it_began() -> None:
    loader = DataLoader(Numbers(22), batch_size=2, shuffle=True)
    two = source(loader, 0, 2)
    position = two.position_after(3)
    three = source(loader, 0, 3)
    three.start(0, position)
    assert position == {"samples": 12}
    assert three.batches_before(position) == 2
    assert three.position_after(3) == {"samples": 18}
    assert three.position_after(4) == {"samples": 22}


def test_a_rank_without_samples_in_the_last_global_batch_gets_no_batch() -> None:
    parts = [read(source(DataLoader(Numbers(5), batch_size=2), rank, 2)) for rank in range(2)]
    assert parts == [[[0, 1], [4]], [[2, 3], NO_BATCH]]
    assert [read(source([1, 2, 3, 4], rank, 3)) for rank in range(3)] == [[1, 4], [2, NO_BATCH], [3, NO_BATCH]]
    assert source([1, 2, 3, 4], 0, 3).len_batches() == 2


def test_only_what_is_consumed_is_loaded() -> None:
    data = Numbers(22)
    assert read(source(DataLoader(data, batch_size=3), 1, 2), 0, {"samples": 12}) == [[15, 16, 17], [20, 21]]
    assert data.fetched == [15, 16, 17, 20, 21]


def test_epochs_are_shuffled_differently_and_repeatably() -> None:
    loader = DataLoader(Numbers(22), batch_size=22, shuffle=True)
    epochs = [flat(read(source(loader), epoch)) for epoch in range(3)]
    assert len({tuple(each) for each in epochs}) == 3
    assert flat(read(source(loader), 1)) == epochs[1]
    assert flat(read(source(loader, seed=4), 1)) != epochs[1]
    assert flat(read(source(loader, sequential=True), 1)) == list(range(22))


def test_a_loaders_own_generator_decides_its_order_and_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(11)
    state = generator.get_state()
    loader = DataLoader(Numbers(22), batch_size=22, shuffle=True, generator=generator)
    assert read(source(loader, seed=0)) == read(source(loader, seed=1))
    assert torch.equal(generator.get_state(), state)


@pytest.mark.parametrize("kind", LOADERS)
def test_reading_consumes_no_global_randomness(kind: str) -> None:
    state, torch_state = random.getstate(), torch.get_rng_state()
    read(source(LOADERS[kind](), 0, 2))
    list(prepare_evaluation(LOADERS[kind](), rank=0, size=2).start())
    assert random.getstate() == state
    assert torch.equal(torch.get_rng_state(), torch_state)


def test_workers_change_neither_the_order_nor_the_augmentation() -> None:
    def run(workers: int, position: dict[str, Any] | None = None) -> torch.Tensor:
        loader = DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=workers)
        return torch.cat(list(source(loader).start(1, position)))

    alone, one, two = run(0), run(1), run(2)
    assert torch.equal(alone[:, 0], one[:, 0])
    assert torch.equal(one, two)
    assert torch.equal(run(2, {"samples": 6}), one[6:])
    assert len(set(one[:, 1].tolist())) == len(set(one[:, 2].tolist())) == 11


def test_augmentation_is_the_same_on_any_number_of_ranks() -> None:
    loader = DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=1)
    alone = torch.cat(list(source(loader).start(0)))
    both = [torch.cat([each for each in source(loader, r, 2).start(0) if each is not NO_BATCH]) for r in range(2)]
    assert sorted(torch.cat(both).tolist()) == sorted(alone.tolist())


def test_persistent_workers_stay_and_read_each_epoch_as_fresh_ones_do() -> None:
    def loader(persistent: bool) -> DataLoader[Sample]:
        return DataLoader(Augmented(), 3, shuffle=True, num_workers=1, persistent_workers=persistent)

    kept: Any = source(loader(True))
    next(iter(kept.start(0)))  # An epoch that is left in the middle.
    workers = {worker.pid for worker in kept._loader._iterator._workers}
    for epoch, position in [(1, None), (2, {"samples": 6})]:
        fresh = torch.cat(list(source(loader(False)).start(epoch, position)))
        assert torch.equal(torch.cat(list(kept.start(epoch, position))), fresh)
    assert {worker.pid for worker in kept._loader._iterator._workers} == workers


class Labelled(DataLoader[Sample]):
    """A loader with a constructor and attributes of its own."""

    def __init__(self, label: str) -> None:
        super().__init__(Numbers(6), batch_size=2)
        self.label = label

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield self.label, batch.tolist()


def test_a_subclass_keeps_its_attributes_and_its_iteration() -> None:
    loader = Labelled("x")
    assert read(source(loader, 1, 2)) == [("x", [2, 3]), ("x", [5])]
    assert list(loader) == [("x", [0, 1]), ("x", [2, 3]), ("x", [4, 5])]


def test_a_subclass_that_does_not_read_its_sampler_is_refused() -> None:
    class Deaf(Labelled):
        def __iter__(self) -> Any:
            yield from range(3)

    class Computed(Labelled):
        @property
        def batch_sampler(self) -> Any:
            return [[0]]

        @batch_sampler.setter
        def batch_sampler(self, value: Any) -> None: ...

    with refuses(DataError, "Deaf"):
        read(source(Deaf("x"), 0, 2))
    with refuses(ConfigurationError, "Computed", "batch_sampler"):
        source(Computed("x"))


def test_a_users_own_distributed_sampler_is_used_as_it_is_and_resumes() -> None:
    def loader(rank: int) -> DataLoader[Sample]:
        data = Numbers(13)
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, rank, shuffle=True))

    for rank in range(2):
        given = loader(rank)
        cast(Any, given.sampler).set_epoch(1)
        expected = [batch.tolist() for batch in given]
        mine = source(loader(rank), rank, 2)
        assert read(mine, 1) == expected
        assert (mine.len_batches(), mine.position_after(3)) == (4, {"samples": 12})
        assert read(mine, 1, mine.position_after(2)) == expected[2:]
    with refuses(ConfigurationError, "num_replicas=2"):
        source(loader(0), 0, 3)


def test_without_sharding_each_rank_reads_all() -> None:
    for loader in (DataLoader(Numbers(5), batch_size=2), [[0, 1], [2, 3], [4]]):
        for rank in range(2):
            unshared = source(loader, rank, 2, shard=False)
            assert read(unshared) == [[0, 1], [2, 3], [4]]
            assert read(unshared, 0, unshared.position_after(1)) == [[2, 3], [4]]
            assert unshared.len_batches() == unshared.len_batches(unshared.position_after(1)) == 3


def test_set_epoch_is_called_once_wherever_there_is_one() -> None:
    data = Numbers(4)
    read(source(DataLoader(data, batch_size=2)), 5)
    assert data.epochs == [5]


def test_one_process_iterates_a_plain_list_itself() -> None:
    assert type(source(BATCHES).start(0)) is type(iter([]))


def test_an_iterator_is_read_once_and_a_restartable_iterable_repeatedly() -> None:
    class Anew:
        def __iter__(self) -> Anew:
            self.left = iter([1, 2])
            return self

        def __next__(self) -> int:
            return next(self.left)

    again = source(Anew())
    assert [read(again), read(again)] == [[1, 2], [1, 2]]
    assert list(iter(again.start(0, {"batches": 1}))) == [2]
    once = source(number for number in range(3))
    assert read(once) == [0, 1, 2]
    with refuses(DataError, "train_dataloaders", "generator"):
        once.start(1)


def test_a_position_of_another_kind_of_loader_is_refused() -> None:
    with refuses(CheckpointError, "'samples'"):
        source(BATCHES).start(0, {"samples": 3})


@pytest.mark.parametrize("kind", LOADERS)
def test_an_evaluation_deals_whole_batches_and_limits_count_for_all_ranks(kind: str) -> None:
    alone = list(prepare_evaluation(LOADERS[kind](), rank=0, size=1).start())
    for size, limit in product((1, 2, 3), (None, 0, 1, 4)):
        dealt = []
        for rank in range(size):
            mine = prepare_evaluation(LOADERS[kind](), rank=rank, size=size)
            batches = list(mine.start(limit=limit))
            expected = mine.len_local(limit)
            assert expected is None or expected >= len(batches)
            assert mine.len_batches() in (None, len(alone))
            dealt += [(number, values(batch)) for number, batch in batches]
        assert sorted(dealt) == [(number, values(batch)) for number, batch in alone][:limit]


def test_an_evaluation_loads_its_own_batches_only_and_is_the_same_each_time() -> None:
    data = Numbers(7)
    mine = prepare_evaluation(DataLoader(data, batch_size=2), rank=1, size=2)
    assert [(number, values(batch)) for number, batch in mine.start()] == [(1, [2, 3]), (3, [6])]
    assert data.fetched == [2, 3, 6]
    shuffled = prepare_evaluation(DataLoader(data, batch_size=7, shuffle=True), rank=0, size=1)
    assert [values(batch) for _, batch in shuffled.start()] == [values(batch) for _, batch in shuffled.start()]


def test_an_evaluation_with_a_distributed_sampler_sees_every_sample_once() -> None:
    data = Numbers(5)
    seen = []
    for rank in range(2):
        loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, rank, shuffle=False))
        seen += flat([values(batch) for _, batch in prepare_evaluation(loader, rank=rank, size=2).start()])
    assert sorted(seen) == list(range(5))


def test_an_evaluation_that_the_user_shards_keeps_all_its_batches() -> None:
    mine = prepare_evaluation([7, 8, 9], rank=1, size=2, shard=False)
    assert list(mine.start()) == [(1, 7), (3, 8), (5, 9)]
    assert list(mine.start(limit=4)) == [(1, 7), (3, 8)]
    assert mine.len_local(4) == 2


def test_an_empty_evaluation_loader_yields_nothing() -> None:
    mine = prepare_evaluation(DataLoader(Numbers(0), batch_size=2), rank=0, size=2)
    assert (list(mine.start()), mine.len_batches(), mine.len_local()) == ([], 0, 0)


def test_several_evaluation_loaders_are_read_one_by_one() -> None:
    loader = DataLoader(Numbers(3), batch_size=2)
    names = [each.name for each in prepare_evaluations([loader, loader], rank=0, size=1)]
    assert names == ["val_dataloaders[0]", "val_dataloaders[1]"]
    assert len(prepare_evaluations(BATCHES, rank=0, size=1)) == 1
    assert prepare_evaluations(None, rank=0, size=1) == []
    assert len(prepare_evaluations({"a": loader, "b": BATCHES}, rank=0, size=1)) == 2
