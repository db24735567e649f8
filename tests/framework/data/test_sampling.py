"""Which samples a rank reads is a function of (seed, epoch, position, rank, size)."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from itertools import chain, product
from typing import Any

import pytest
import torch

from phalanx.framework.core.position_rng import SeededBatch, SeededDataset, SeededIndex, mix_seed
from phalanx.framework.data.orders import NaturalOrder, Order, SamplerOrder
from phalanx.framework.data.samplers import TrainingSampler
from phalanx.framework.distributed.data_parallel import part_of

LENGTHS = (0, 1, 2, 5, 7, 22, 1797)


class Numbers:
    """A dataset of ``count`` samples."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, random.random(), torch.rand(()).item()


def training(order: Order, width: int, rank: int, size: int, **options: Any) -> TrainingSampler:
    defaults: dict[str, Any] = {"drop_last": False, "whole": False, "seed": 0, "seeded": False}
    return TrainingSampler(None, order, width, rank=rank, size=size, **{**defaults, **options})


def global_batches(order: Order, width: int, size: int, start: int = 0, **options: Any) -> list[list[int]]:
    """Return the samples of each global micro-batch, put together from those of all ranks."""
    samplers = [training(order, width, rank, size, **options) for rank in range(size)]
    for sampler in samplers:
        sampler.start = start
    parts = [list(sampler) for sampler in samplers]
    for sampler, part in zip(samplers, parts, strict=True):
        assert len(sampler) == len(part) + sampler.has_no_last_part
    return [
        [index for part in parts for index in (part[k] if k < len(part) else ())]
        for k in range(max(len(part) for part in parts))
    ]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(("shuffle", "drop_last"), [(False, False), (True, False), (True, True)])
def test_ranks_together_read_what_one_process_reads_batch_by_batch(size: int, shuffle: bool, drop_last: bool) -> None:
    for length, width in product(LENGTHS, (1, 4, 32)):
        order = NaturalOrder(range(length), 7, shuffle)
        together = global_batches(order, width, size, drop_last=drop_last)
        assert together == global_batches(order, width * size, 1, drop_last=drop_last)
        kept = length - length % (width * size) if drop_last else length
        assert list(chain.from_iterable(together)) == list(order.items(0))[:kept]


def test_a_short_last_batch_is_split_as_evenly_as_possible() -> None:
    assert [part_of(5, rank, 3) for rank in range(3)] == [(0, 2), (2, 4), (4, 5)]
    assert [part_of(1, rank, 3) for rank in range(3)] == [(0, 1), (1, 1), (1, 1)]
    assert [list(training(NaturalOrder(range(9), 0, False), 4, rank, 2)) for rank in range(2)] == [
        [[0, 1, 2, 3], [8]],
        [[4, 5, 6, 7]],
    ]


def test_mixed_seeds_do_not_collide_where_sums_would() -> None:
    seeds = {mix_seed(seed, epoch, place) for seed in range(10) for epoch in range(10) for place in range(100)}
    assert len(seeds) == 10_000
    assert all(0 <= seed < 1 << 63 for seed in seeds)


class Endless:
    """A sampler without length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from torch.randperm(5).tolist()


def drawn(order: SamplerOrder, epoch: int) -> list[Any]:
    items = order.items(epoch)
    assert isinstance(items, list)
    return items


def test_a_samplers_own_generator_is_seeded_for_the_epoch_and_put_back() -> None:
    generator = torch.Generator().manual_seed(5)
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 20, 20, generator=generator)
    order = SamplerOrder(sampler, 0)
    first, second = drawn(order, 0), drawn(order, 1)
    assert first != second
    assert drawn(order, 0) == first
    assert generator.initial_seed() == 5


def test_an_endless_sampler_is_read_lazily_and_resumes() -> None:
    def batches(rank: int, size: int, start: int, count: int) -> list[list[int]]:
        sampler = training(SamplerOrder(Endless(), 1), 3, rank, size)
        sampler.start = start
        state = torch.get_rng_state()
        found = [batch for batch, _ in zip(sampler, range(count), strict=False)]
        assert torch.equal(torch.get_rng_state(), state)
        return found

    one = batches(0, 1, 0, 8)
    assert [batches(0, 2, 0, 4), batches(1, 2, 0, 4)] == [one[0::2], one[1::2]]
    assert batches(0, 1, 9, 5) == one[3:]
    with pytest.raises(TypeError):
        len(training(SamplerOrder(Endless(), 1), 3, 0, 1))


def test_a_sample_is_seeded_by_its_position_whatever_batch_it_is_in() -> None:
    dataset = SeededDataset(Numbers(10))
    together = dataset.__getitems__(SeededBatch([3, 4, 5], 9, 0))
    assert dataset.__getitems__(SeededBatch([4, 5], 9, 1)) == together[1:]
    assert len({sample[1] for sample in together}) == 3
    assert dataset[SeededIndex(2, 5)] == dataset[SeededIndex(2, 5)]
    assert dataset[SeededIndex(2, 5)] != dataset[SeededIndex(2, 6)]


def test_a_dataset_that_fetches_whole_batches_still_does() -> None:
    class Whole(Numbers):
        def __getitems__(self, indices: list[int]) -> list[float]:
            return [index + torch.rand(()).item() for index in indices]

    whole = SeededDataset(Whole(10))
    assert whole.__getitems__(SeededBatch([1, 2], 9, 4)) == whole.__getitems__(SeededBatch([1, 2], 9, 4))
    assert whole.__getitems__(SeededBatch([1, 2], 9, 4)) != whole.__getitems__(SeededBatch([1, 2], 9, 5))
    subset = SeededDataset(torch.utils.data.Subset(Numbers(10), [7, 8, 9]))  # type: ignore[arg-type]
    assert subset.__getitems__(SeededBatch([0, 1], 9, 0))[1] == subset.__getitems__(SeededBatch([1], 9, 1))[0]


def test_what_travels_to_workers_survives_pickling_and_delegates() -> None:
    dataset = SeededDataset(Numbers(10))
    dataset.count = 4
    twin = pickle.loads(pickle.dumps(dataset))
    batch = pickle.loads(pickle.dumps(SeededBatch([1, 2], 3, 4)))
    assert (twin.count, len(twin), twin[1][0]) == (4, 4, 1)
    assert (list(batch), batch.seed, batch.first) == ([1, 2], 3, 4)
