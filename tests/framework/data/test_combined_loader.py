"""Several loaders side by side, against expectations written by hand; and data modules."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from messages import refuses
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from phalanx import CombinedLoader, DataModule
from phalanx.framework.core.errors import CheckpointError, ConfigurationError, DataError, UnknownNameError
from phalanx.framework.data.combined_source import (
    CombinedTraining,
    prepare_evaluation,
    prepare_evaluations,
    prepare_training,
)
from phalanx.framework.data.training_source import NO_BATCH

LONG, SHORT = ["a0", "a1", "a2", "a3", "a4"], ["b0", "b1"]
EXPECTED: dict[str, list[tuple[str, str | None]]] = {
    "min_size": [("a0", "b0"), ("a1", "b1")],
    "max_size": [("a0", "b0"), ("a1", "b1"), ("a2", None), ("a3", None), ("a4", None)],
    "max_size_cycle": [("a0", "b0"), ("a1", "b1"), ("a2", "b0"), ("a3", "b1"), ("a4", "b0")],
}


def numbers(count: int, batch_size: int = 1, shuffle: bool = False) -> DataLoader[Any]:
    return DataLoader(range(count), batch_size=batch_size, shuffle=shuffle)  # type: ignore[arg-type]


def values(row: Any) -> Any:
    return row if row is NO_BATCH else {name: part.tolist() for name, part in row.items()}


@pytest.mark.parametrize("mode", EXPECTED)
def test_iterating_by_hand_gives_rows_in_the_given_structure(mode: str) -> None:
    rows = [{"x": first, "y": [second]} for first, second in EXPECTED[mode]]
    loader = CombinedLoader({"x": LONG, "y": [iter_list(SHORT)]}, mode)
    assert list(loader) == [(row, index, 0) for index, row in enumerate(rows)]
    assert len(CombinedLoader([LONG, SHORT], mode)) == len(rows)


def iter_list(items: list[str]) -> Any:
    class Loader:
        dataset = items

        def __iter__(self) -> Any:
            return iter(items)

    return Loader()


def test_sequential_by_hand_reads_one_loader_after_the_other() -> None:
    loader = CombinedLoader([SHORT, ["c0"]], "sequential")
    assert list(loader) == [("b0", 0, 0), ("b1", 1, 0), ("c0", 0, 1)]
    assert len(loader) == 3


@pytest.mark.parametrize("mode", EXPECTED)
def test_training_reads_the_rows_and_resumes_at_each(mode: str) -> None:
    def source() -> Any:
        return prepare_training(CombinedLoader((LONG, SHORT), mode), rank=0, size=1, seed=0)

    first = source()
    assert list(first.start(0)) == EXPECTED[mode]
    assert first.len_batches() == len(EXPECTED[mode])
    for consumed in range(len(EXPECTED[mode]) + 1):
        position = first.position_after(consumed)
        again = source()
        assert list(again.start(0, position)) == EXPECTED[mode][consumed:]
        assert again.batches_before(position) == consumed
        assert again.len_batches(position) == len(EXPECTED[mode])
        for more in range(consumed, len(EXPECTED[mode]) + 1):
            assert list(source().start(0, again.position_after(more))) == EXPECTED[mode][more:]


def test_a_part_without_length_cycles_and_resumes_too() -> None:
    class Unsized:
        def __iter__(self) -> Any:
            return iter(SHORT)

    def source() -> Any:
        return prepare_training({"a": LONG, "b": Unsized()}, rank=0, size=1, seed=0)

    first = source()
    expected = [{"a": a, "b": b} for a, b in EXPECTED["max_size_cycle"]]
    assert list(first.start(0)) == expected
    assert first.len_batches() is None
    for consumed in range(6):
        position = first.position_after(consumed)
        assert list(source().start(0, position)) == expected[consumed:]
        assert source().batches_before(position) == consumed


def test_each_cycle_is_shuffled_differently_and_resumes_exactly() -> None:
    def source() -> Any:
        return prepare_training({"a": numbers(12), "b": numbers(4, 1, shuffle=True)}, rank=0, size=1, seed=1)

    first = source()
    rows = [values(row) for row in first.start(3)]
    cycles = [[row["b"][0] for row in rows[begin : begin + 4]] for begin in (0, 4, 8)]
    assert [sorted(cycle) for cycle in cycles] == [[0, 1, 2, 3]] * 3
    assert len({tuple(cycle) for cycle in cycles}) > 1
    for consumed in range(13):
        assert [values(row) for row in source().start(3, first.position_after(consumed))] == rows[consumed:]


def test_ranks_share_each_part_and_a_row_is_missing_where_a_part_is() -> None:
    rows = [
        [values(row) for row in prepare_training(
            CombinedLoader({"a": numbers(5, 2), "b": numbers(8, 2)}, "min_size"), rank=rank, size=2, seed=0
        ).start(0)]
        for rank in range(2)
    ]  # fmt: skip
    assert rows[0] == [{"a": [0, 1], "b": [0, 1]}, {"a": [4], "b": [4, 5]}]
    assert rows[1] == [{"a": [2, 3], "b": [2, 3]}, NO_BATCH]


def test_a_combination_resumes_on_another_number_of_ranks() -> None:
    def source(rank: int, size: int) -> Any:
        return prepare_training({"a": numbers(12, 2, True), "b": numbers(8, 2, True)}, rank=rank, size=size, seed=0)

    def together(size: int, position: Any) -> dict[str, list[int]]:
        seen: dict[str, list[int]] = {"a": [], "b": []}
        for rows in zip(*(source(rank, size).start(0, position) for rank in range(size)), strict=True):
            for row in rows:
                for name, part in values(row).items():
                    seen[name] += part
        return seen

    two = source(0, 2)
    list(two.start(0))
    position = two.position_after(1)
    whole, rest = together(1, None), together(1, position)
    assert rest["a"] == whole["a"][4:]
    assert rest["b"][:4] == whole["b"][4:8]
    assert source(0, 1).batches_before(position) == 2
    assert together(2, position)["a"] == rest["a"]


def test_a_dict_or_list_of_loaders_cycles_and_a_list_of_batches_is_one_loader() -> None:
    kinds = {
        "dict": {"a": LONG},
        "list of loaders": [numbers(3), numbers(2)],
        "nested": [{"a": numbers(3)}, (numbers(2), LONG)],
        "batches": LONG,
        "pairs": [[torch.ones(1), torch.ones(1)], [torch.ones(1), torch.ones(1)]],
        "dict batches": [{"x": torch.ones(1)}],
    }
    sources = {name: prepare_training(given, rank=0, size=1, seed=0) for name, given in kinds.items()}
    combined = {name for name, source in sources.items() if isinstance(source, CombinedTraining)}
    assert combined == {"dict", "list of loaders", "nested"}
    row = next(sources["nested"].start(0))
    assert (row[0]["a"].tolist(), row[1][0].tolist(), row[1][1]) == ([0], [0], "a0")


def test_what_cannot_be_combined_is_refused() -> None:
    with refuses(UnknownNameError, "'minsize'", "'min_size'"):
        CombinedLoader([LONG], "minsize")
    with refuses(ConfigurationError, "iterables['a']", "int"):
        CombinedLoader({"a": 3})
    with refuses(ConfigurationError, "iterables['a']", "CombinedLoader"):
        CombinedLoader({"a": CombinedLoader([LONG])})
    with refuses(ConfigurationError, "mode='sequential'"):
        prepare_training(CombinedLoader([LONG], "sequential"), rank=0, size=1, seed=0)
    with refuses(DataError, "train_dataloaders['b']"):
        list(prepare_training({"a": LONG, "b": iter(SHORT)}, rank=0, size=1, seed=0).start(0))
    one = prepare_training({"a": LONG}, rank=0, size=1, seed=0)
    of_two = prepare_training([numbers(2), numbers(3)], rank=0, size=1, seed=0).position_after(1)
    with refuses(CheckpointError, "train_dataloaders", "2 loaders"):
        one.start(0, of_two)


@pytest.mark.parametrize("mode", EXPECTED)
def test_an_evaluation_deals_out_rows_by_number(mode: str) -> None:
    for size, limit in itertools.product((1, 2, 3), (None, 0, 2, 4)):
        dealt = []
        for rank in range(size):
            mine = prepare_evaluation(CombinedLoader([LONG, SHORT], mode), rank=rank, size=size)
            rows = list(mine.start(limit=limit))
            assert len(rows) == mine.len_local(limit)
            dealt += rows
        assert (
            sorted(dealt, key=lambda each: each[0])
            == [(index, list(row)) for index, row in enumerate(EXPECTED[mode])][:limit]
        )


def test_a_sequential_evaluation_is_one_source_for_each_loader() -> None:
    sources = prepare_evaluations(CombinedLoader({"a": LONG, "b": SHORT}, "sequential"), rank=0, size=2)
    assert [[batch for _, batch in source.start()] for source in sources] == [["a0", "a2", "a4"], ["b0"]]
    assert len(prepare_evaluations(CombinedLoader([LONG, SHORT], "min_size"), rank=0, size=2)) == 1


def test_a_data_module_from_datasets_has_the_loaders_of_those_given() -> None:
    data = TensorDataset(torch.arange(5))
    module = DataModule.from_datasets(data, [data, data], batch_size=2)
    assert [module.provides(f"{stage}_dataloader") for stage in ("train", "val", "test")] == [True, True, False]
    assert sorted(x for (batch,) in module.train_dataloader() for x in batch.tolist()) == [0, 1, 2, 3, 4]
    assert len(module.val_dataloader()) == 2
    assert module.test_dataloader() is None


def test_a_data_modules_overridden_hooks_are_recognised() -> None:
    class Mine(DataModule):
        def test_dataloader(self) -> Any:
            return LONG

    assert Mine().provides("test_dataloader")
    assert not Mine().provides("train_dataloader")
    moved = Mine().transfer_batch_to_device({"x": torch.ones(1), "y": "text"}, torch.device("meta"), 0)
    assert (moved["x"].device.type, moved["y"]) == ("meta", "text")


def seen_by_ranks(loaders: Any, size: int, mode: str, resume_after: int = 0) -> list[list[Any]]:
    """Return the rows of each rank, of which the last ones are read after a resumption."""
    ranks = []
    for rank in range(size):
        source = prepare_training(CombinedLoader(loaders(), mode), rank=rank, size=size, seed=0)
        rows = list(itertools.islice(source.start(0), resume_after or None))
        if resume_after:
            position = source.position_after(resume_after)
            source = prepare_training(CombinedLoader(loaders(), mode), rank=rank, size=size, seed=0)
            rows += source.start(0, position)
        ranks.append(rows)
    return ranks


@pytest.mark.parametrize(("size", "iterates"), [(2, False), (3, False), (2, True), (3, True)])
@pytest.mark.parametrize(("first", "second"), [(40, 9), (9, 11), (26, 14)])
def test_each_sample_is_read_where_a_rank_has_no_batch_of_a_loader(
    size: int, iterates: bool, first: int, second: int
) -> None:
    class Stream(IterableDataset[float]):
        def __iter__(self) -> Iterator[float]:
            return iter(range(100, 100 + second))

    def loaders() -> list[Any]:
        other: Any = Stream() if iterates else list(range(100, 100 + second))
        one: Any = list(range(first))
        return [DataLoader(one, batch_size=2), DataLoader(other, batch_size=2)]

    ranks = seen_by_ranks(loaders, size, "max_size_cycle")
    rows = [row for rows in ranks for row in rows if row is not NO_BATCH]
    for place, wanted in enumerate([range(first), range(100, 100 + second)]):
        assert {sample for row in rows for sample in row[place].tolist()} == set(wanted)
    assert len({len(rows) for rows in ranks}) == 1 or iterates
    for consumed in (1, 2, 4):
        again = seen_by_ranks(loaders, size, "max_size_cycle", consumed)
        assert [list(map(str, rows)) for rows in again] == [list(map(str, rows)) for rows in ranks]


def test_a_loader_has_ended_where_a_rank_has_no_batch_of_it() -> None:
    def loaders() -> list[Any]:
        data: list[Any] = [list(range(6)), list(range(3))]
        return [DataLoader(one, batch_size=1) for one in data]

    first, second = seen_by_ranks(loaders, 2, "max_size")
    assert [None if row[1] is None else int(row[1]) for row in first] == [0, 2, None]
    assert [None if row[1] is None else int(row[1]) for row in second] == [1, None, None]
    assert [row is NO_BATCH for row in seen_by_ranks(loaders, 2, "min_size")[1]] == [False, True]


def test_a_loader_without_a_batch_for_a_rank() -> None:
    def loaders() -> list[Any]:
        data: list[Any] = [list(range(6)), [1]]
        return [DataLoader(one, batch_size=1) for one in data]

    with refuses(DataError, "train_dataloaders[1]"):
        seen_by_ranks(loaders, 2, "max_size_cycle")
