"""``Mix``: exact proportions, the same order on any number of ranks and workers, resumed at the same sample."""

from __future__ import annotations

import copy
import json
import pickle
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from library_streams import (
    hugging_face,
    in_turn,
    interrupted,
    kept_state,
    loader,
    prepare_libraries,
    read,
    read_by_ranks,
    resumed,
    source,
)
from messages import refuses
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from phalanx import Mix
from phalanx.framework.checkpoint.codec import decode, encode_inline
from phalanx.framework.core.errors import ConfigurationError, DataError, UnknownNameError
from phalanx.framework.data.mix_schedule import LONGEST_PERIOD, MixSchedule

WEIGHTS: list[list[float]] = [
    [1],
    [0.7, 0.3],
    [1, 1, 1],
    [0.1, 0.2, 0.7],
    [5, 0, 2],
    [0.33, 0.33, 0.34],
    [90, 1, 1, 1, 1, 1, 5],
    [13, 11, 7, 5, 3, 2],
    [50, 30, 11, 5, 3, 1],
]


def named(letter: str, count: int) -> list[str]:
    return [f"{letter}{number}" for number in range(count)]


class Stream(IterableDataset[Any]):
    """Yields its items in order, after a first one that holds the epoch; without a state."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.epoch = 0
        self.read = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for item in [*self.items[self.epoch % 3 :], *self.items[: self.epoch % 3]]:
            self.read += 1
            yield item


class Stateful(Stream):
    """The same, with a state that resumes without reading again."""

    position = 0

    def __iter__(self) -> Iterator[Any]:
        items = [*self.items[self.epoch % 3 :], *self.items[: self.epoch % 3]]
        first, self.position = self.position, 0
        for place in range(first, len(items)):
            self.read += 1
            self.now = place + 1
            yield items[place]

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


# ---- the schedule ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", WEIGHTS)
def test_each_prefix_has_the_right_proportions_to_within_one(weights: list[float]) -> None:
    schedule = MixSchedule(weights)
    total = sum(Fraction(str(weight)) for weight in weights)
    drawn = [0] * len(weights)
    for index in range(2 * schedule.period + 3):
        source, place = schedule.locate(index)
        assert (place, schedule.position(source, place)) == (drawn[source], index)
        drawn[source] += 1
        for count, weight in zip(drawn, weights, strict=True):
            assert abs(count - Fraction(str(weight)) / total * (index + 1)) < 1


def test_weights_of_any_ratio_are_rounded_to_a_bounded_period() -> None:
    schedule = MixSchedule([1 / 3, 1234567, 7654321, 1e-9])
    assert schedule.period == LONGEST_PERIOD
    assert schedule.counts[0] == schedule.counts[3] == 1
    assert abs(schedule.counts[1] / LONGEST_PERIOD - 1234567 / (1234567 + 7654321)) < 2 / LONGEST_PERIOD
    drawn = Counter(schedule.locate(index)[0] for index in range(20000))
    assert abs(drawn[1] - 20000 * schedule.counts[1] / LONGEST_PERIOD) < 1


# ---- map-style sources -----------------------------------------------------------------------------------------------


def by_hand(sizes: dict[str, int], weights: list[float], stop: str) -> list[str]:
    """Return the names of the sources drawn in an epoch, by counting."""
    schedule, left, names = MixSchedule(weights), dict(sizes), list(sizes)
    drawn: list[str] = []
    ended: set[str] = set()
    needed = {name for name, weight in zip(names, weights, strict=True) if weight}
    while not (ended if stop == "first" else ended >= needed):
        name = names[schedule.locate(len(drawn))[0]]
        drawn.append(name)
        left[name] -= 1
        if left[name] == 0:
            ended.add(name)
            left[name] = sizes[name]
    return drawn


@pytest.mark.parametrize("stop", ["first", "all"])
@pytest.mark.parametrize("weights", [[0.7, 0.3], [1, 4], [0.5, 0.5], [1, 0]])
def test_an_epoch_ends_when_the_first_or_the_last_source_is_used_up(weights: list[float], stop: str) -> None:
    sizes = {"a": 13, "b": 5}
    mix = Mix({name: named(name, size) for name, size in sizes.items()}, weights, stop=stop)
    samples = [mix[index] for index in range(len(mix))]
    assert [sample[0] for sample in samples] == by_hand(sizes, weights, stop)
    for name, size in sizes.items():
        own = [sample for sample in samples if sample[0] == name]
        for begin in range(0, len(own), size):
            # No sample comes twice in a pass, and a complete pass has them all.
            assert len(set(own[begin : begin + size])) == len(own[begin : begin + size])
    assert mix.locate(3) == (samples[3][0], int(samples[3][1:]))


def test_a_number_of_samples_is_the_length_and_the_order_depends_on_seed_and_epoch() -> None:
    def epoch(number: int, **options: Any) -> list[str]:
        mix = Mix({"a": named("a", 9), "b": named("b", 4)}, {"b": 1, "a": 2}, stop=50, **options)
        mix.set_epoch(number)
        return [mix[index] for index in range(len(mix))]

    assert len(epoch(0)) == 50
    assert epoch(0) == epoch(0) != epoch(1)
    assert epoch(0, seed=1) != epoch(0)
    assert epoch(0, shuffle=False) == epoch(1, shuffle=False)
    assert [each for each in epoch(0, shuffle=False) if each[0] == "b"][:5] == ["b0", "b1", "b2", "b3", "b0"]
    passes = [each for each in epoch(0) if each[0] == "a"]
    assert sorted(passes[:9]) == sorted(passes[9:18]) == named("a", 9)
    assert passes[:9] != passes[9:18]


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_do_not_change_the_order_and_a_resume_is_exact(workers: int) -> None:
    mix = Mix({"a": named("a", 23), "b": named("b", 9)}, [3, 1], stop=31)
    mix.set_epoch(2)
    alone = [mix[index] for index in range(31)]
    for size in (1, 2, 3) if workers == 0 else (2,):
        assert list(chain(*read_by_ranks(loader(mix, workers), size, 2))) == alone
        assert list(chain(*read_by_ranks(loader(mix, workers), size, 2, {"samples": 12}))) == alone[12:]


def test_persistent_workers_get_the_epoch() -> None:
    mix = Mix({"a": named("a", 20), "b": named("b", 20)}, [1, 1])
    persistent = DataLoader(mix, batch_size=40, num_workers=1, persistent_workers=True)
    given = source(lambda rank, size: persistent, 0, 1)
    epochs = [list(chain(*given.start(epoch))) for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    mix.set_epoch(1)
    assert epochs[1] == [mix[index] for index in range(len(mix))]


def test_weights_may_change_at_an_epoch() -> None:
    mix = Mix([named("a", 50), named("b", 50)], lambda epoch: [9 - epoch, 1 + epoch], stop=40)
    counts = []
    for epoch in (0, 4, 0):
        mix.set_epoch(epoch)
        counts.append(Counter(mix[index][0] for index in range(len(mix)))["b"])
    assert counts == [4, 20, 4]
    assert mix.names == ("0", "1")


def test_a_mix_survives_copies_and_pickling() -> None:
    mix = Mix({"a": named("a", 5), "b": named("b", 5)}, [1, 2], stop=9)
    for twin in (copy.copy(mix), copy.deepcopy(mix), pickle.loads(pickle.dumps(mix))):
        assert [twin[index] for index in range(9)] == [mix[index] for index in range(9)]
    with pytest.raises(IndexError):
        mix[9]


# ---- iterable sources ------------------------------------------------------------------------------------------------


def streams(kind: type[Stream], stop: str | int) -> Any:
    a, b = kind([f"a{k}" for k in range(7)]), [f"b{k}" for k in range(5)]
    return Mix({"a": a, "b": b}, [0.6, 0.4], stop=stop)


@pytest.mark.parametrize("stop", ["first", "all", 40])
@pytest.mark.parametrize("kind", [Stream, Stateful])
def test_a_mixed_stream_resumes_at_each_sample(kind: type[Stream], stop: str | int) -> None:
    mix = streams(kind, stop)
    mix.set_epoch(1)
    whole = list(mix)
    assert [each[0] for each in whole] == ["ab"[MixSchedule([6, 4]).locate(k)[0]] for k in range(len(whole))]
    assert (set(whole) == {f"a{k}" for k in range(7)} | {f"b{k}" for k in range(5)}) or stop == "first"
    for consumed in range(len(whole) + 1):
        first = streams(kind, stop)
        first.set_epoch(1)
        samples = iter(first)
        for _ in range(consumed):
            next(samples)
        state = decode(json.loads(json.dumps(encode_inline(first.state_dict()))))
        again = streams(kind, stop)
        again.set_epoch(1)
        again.load_state_dict(state)
        iter(again)
        assert again.state_dict() == state
        again.load_state_dict(state)
        assert list(again) == whole[consumed:]
        first_source = again._sources[0]
        assert first_source.read <= (sum(each[0] == "a" for each in whole[consumed:]) + 1 if kind is Stateful else 99)
        again.set_epoch(2)
        mix.set_epoch(2)
        assert list(again) == list(mix)
        mix.set_epoch(1)


def test_a_state_of_another_epoch_begins_the_epoch() -> None:
    mix = streams(Stateful, 10)
    list(mix)
    state = mix.state_dict()
    mix.set_epoch(1)
    wanted = list(mix)
    again = streams(Stateful, 10)
    again.set_epoch(1)
    again.load_state_dict(state)
    assert list(again) == wanted


@pytest.fixture(scope="module")
def libraries() -> None:
    prepare_libraries()


def test_a_mix_of_hugging_face_streams_resumes_in_a_loader(libraries: None, tmp_path: Path) -> None:
    def make(rank: int, size: int) -> Any:
        streamed, own = hugging_face(tmp_path, "json+shuffled"), [{"id": -k} for k in range(1, 9)]
        return loader(Mix({"hf": streamed, "own": own}, [3, 1], stop="all"))

    whole = read(source(make, 0, 1), 1)
    position, states = interrupted([source(make, rank, 2) for rank in range(2)], 1, 4)
    assert kept_state(states)
    for ranks in (1, 2):
        rows, notes = resumed(make, ranks, 1, position, states)
        assert in_turn(rows) == whole[8:]
        assert notes == []


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_share_a_number_of_samples(workers: int) -> None:
    mix = Mix({"a": Stream(named("a", 7)), "b": named("b", 9)}, [1, 1], stop=7)
    given = DataLoader(mix, batch_size=1, num_workers=workers)
    for _ in range(2):
        samples = [item for batch in given for item in batch]
        assert len(samples) == len(mix) == 7
        shares = [len(range(worker, 7, max(workers, 1))) for worker in range(max(workers, 1))]
        assert Counter(each[0] for each in samples)["a"] == sum(-(-share // 2) for share in shares)


def test_workers_split_what_has_indices() -> None:
    class Split(Stream):
        def __iter__(self) -> Iterator[Any]:
            from torch.utils.data import get_worker_info

            info = get_worker_info()
            yield from self.items if info is None else self.items[info.id :: info.num_workers]

    mix = Mix({"a": Split(named("a", 8)), "b": named("b", 8)}, [1, 1], stop="all")
    samples = [item for batch in DataLoader(mix, batch_size=2, num_workers=2) for item in batch]
    assert sorted(set(samples)) == named("a", 8) + named("b", 8)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sources", "weights", "options", "name"),
    [
        ({}, [], {}, "Mix"),
        ({"a": []}, [1], {}, "'a'"),
        ({"a": 5}, [1], {}, "int"),
        ({"a": iter([1])}, [1], {}, "list_iterator"),
        ({"a": [1], "b": [2]}, [1], {}, "1 weights"),
        ({"a": [1], "b": [2]}, [1, -1], {}, "weight -1"),
        ({"a": [1], "b": [2]}, [1, float("nan")], {}, "weight nan"),
        ({"a": [1], "b": [2]}, [0, 0], {}, "weights of Mix"),
        ({"web": [1], "b": [2]}, {"b": 1}, {}, "'web'"),
        ({"a": [1], "b": [2]}, [1, "x"], {}, "weight 'x'"),
        ({"a": [1], "b": [2]}, [True, 1], {}, "weight True"),
        ({"a": [1], "b": [2]}, torch.tensor([0.7, 0.3]), {}, "tensor([0.7000, 0.3000])"),
        ({"a": [1], "b": [2]}, "12", {}, "'12'"),
        ({"a": [1], "b": [2]}, 1.0, {}, "1.0"),
        (([k] for k in range(3)), [1] * 3, {}, "generator"),
        (TensorDataset(torch.ones(2)), [1], {}, "TensorDataset"),
        ("ab", [1, 1], {}, "str"),
        ({"a": [1]}, [1], {"stop": "last"}, "stop='last'"),
        ({"a": [1]}, [1], {"stop": 0}, "stop=0"),
        ({"a": [1]}, lambda epoch: [1], {}, "stop='first'"),
    ],
)
def test_what_cannot_be_mixed_is_refused(sources: Any, weights: Any, options: Any, name: str) -> None:
    with refuses(ConfigurationError, name):
        Mix(sources, weights, **options)


def test_a_weight_for_an_unknown_source_names_the_closest() -> None:
    with refuses(UnknownNameError, "'wbe'", "'web'"):
        Mix({"web": [1], "code": [2]}, {"wbe": 1, "code": 1})
    with refuses(UnknownNameError, "'A'", "'a'"):
        streams(Stream, 5).load_state_dict({"sources": {"A": {}}})


def test_a_stream_without_samples_is_an_error() -> None:
    with refuses(DataError, "'a'"):
        next(iter(DataLoader(Mix({"a": Stream([]), "b": [1]}, [1, 1]))))
