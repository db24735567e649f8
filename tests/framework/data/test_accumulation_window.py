"""Accumulation windows: when micro-batches are fetched, and that every rank runs those that it has."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses, says
from models import silent_trainer, weights_of
from ranks import run_on_ranks
from small_fits import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from phalanx import TrainModule
from phalanx.callbacks import OnExceptionCheckpoint
from phalanx.framework.core.accumulation import AccumulationSchedule
from phalanx.framework.core.errors import DataError, DesyncError
from phalanx.framework.core.progress import Progress
from phalanx.framework.data.accumulation_window import Windows
from phalanx.framework.data.combined_source import prepare_training
from phalanx.framework.data.training_source import NO_BATCH

Event = tuple[str, int]


class Rows(Dataset[Tensor]):
    """Rows of 3 numbers; notes in ``events`` when each is fetched. The row ``failing`` raises ``error``, once."""

    def __init__(self, count: int, events: list[Event], failing: int = -1, error: Exception | None = None) -> None:
        self.rows = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
        self.events, self.failing, self.error = events, failing, error

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        if index == self.failing and self.error is not None:
            error, self.error = self.error, None
            raise error
        self.events.append(("fetch", index))
        return self.rows[index]


class Net(TrainModule):
    """A small network with state of all kinds; notes when each micro-batch is used."""

    def __init__(self, events: list[Event], dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(dropout), nn.Linear(8, 1))
        self.events = events

    def on_train_start(self) -> None:
        torch.manual_seed(7)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.events.append(("step", batch_idx))
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Weighted(Net):
    def batch_weight(self, batch: Any) -> float:
        return float(len(batch))


class OwnIteration(DataLoader[Any]):
    """A loader that may yield any number of batches, whatever its sampler has."""

    def __iter__(self) -> Any:
        yield from itertools.islice(super().__iter__(), 6)


def events_of(net: type[Net], loader: type[DataLoader[Any]], ranks: int = 1, rank: int = 0) -> str:
    """Return the order in which a rank fetched rows and used batches of one row, in windows of three."""
    events: list[Event] = []
    trainer = silent_trainer(max_epochs=1, accumulate_grad_batches=3, devices=ranks)
    trainer.fit(net(events), loader(Rows(7 * ranks, events), batch_size=1))
    return " ".join(f"{what[0]}{(at - rank) // ranks if what == 'fetch' else at}" for what, at in events)


IN_TURN = "f0 s0 f1 s1 f2 s2 f3 s3 f4 s4 f5 s5 f6 s6"


def test_a_micro_batch_is_fetched_after_the_previous_one_was_used() -> None:
    assert events_of(Net, DataLoader) == IN_TURN


def test_a_window_is_fetched_first_where_its_batches_must_be_counted_or_weighed() -> None:
    first = "f0 f1 f2 s0 s1 s2 f3 f4 f5 s3 s4 s5"
    assert events_of(Weighted, DataLoader) == f"{first} f6 s6"
    assert events_of(Net, OwnIteration) == first


def events_on_rank() -> str:
    rank = torch.distributed.get_rank()
    return events_of(Net, DataLoader, 2, rank)


def test_ranks_fetch_in_turn_as_well() -> None:
    assert run_on_ranks(2, events_on_rank) == [IN_TURN] * 2


# ---- the same batches and weights ---------------------------------------------------------------------------------


def fitted(rows: int, ranks: int, window: int) -> Tensor:
    module = Net([])
    trainer = silent_trainer(max_epochs=2, accumulate_grad_batches=window, devices=ranks)
    trainer.fit(module, DataLoader(Rows(rows, []), batch_size=2))
    return weights_of(module)


def by_hand(rows: int, ranks: int, window: int) -> Tensor:
    """Train on the mean over the micro-batches of each window; a global micro-batch is divided among the ranks."""
    module = Net([])
    optimizer = module.configure_optimizers()
    data = Rows(rows, []).rows
    for _ in range(2):
        together = [list(part.tensor_split(ranks)) for part in data.split(2 * ranks)]
        for begin in range(0, len(together), window):
            shares = [share for part in together[begin : begin + window] for share in part if len(share)]
            optimizer.zero_grad()
            torch.stack([module.net(share).square().mean() for share in shares]).mean().backward()
            optimizer.step()
    return weights_of(module)


# The last window is short, or complete but with a last global micro-batch that some ranks have no part of.
@pytest.mark.parametrize(("rows", "ranks", "window"), [(13, 1, 3), (13, 2, 4), (25, 3, 5), (31, 3, 2)])
def test_the_weights_equal_those_of_a_loop_by_hand(rows: int, ranks: int, window: int) -> None:
    for weights in run_on_ranks(ranks, fitted, rows, ranks, window):
        torch.testing.assert_close(weights, by_hand(rows, ranks, window), rtol=1e-6, atol=1e-7)


class Noisy(Rows):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.randn(3)


def test_random_numbers_are_drawn_in_the_order_of_a_loop_by_hand() -> None:
    module, expected = Net([], dropout=0.5), Net([], dropout=0.5)
    silent_trainer(max_epochs=1, accumulate_grad_batches=2).fit(module, DataLoader(Noisy(6, []), batch_size=1))
    optimizer, data = expected.configure_optimizers(), Noisy(6, [])
    torch.manual_seed(7)
    for index in range(6):
        (expected.net(data[index][None]).square().mean() / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights_of(module), weights_of(expected), rtol=1e-6, atol=1e-7)


class Source:
    """Random windows of a source, beside all batches that it yields."""

    def __init__(self, loader: Any, rank: int, size: int, window: int, limit: int | None) -> None:
        options: dict[str, Any] = {"rank": rank, "size": size, "seed": 1}
        self.rows = [*prepare_training(loader, **options).start(0, None)][:limit]
        self.window, source = window, prepare_training(loader, **options)
        self.progress = Progress()
        full = source.len_batches()
        end = limit if full is None or (limit is not None and limit < full) else full
        self.windows = Windows(source, AccumulationSchedule(window), self.progress, end, size)
        self.windows.begin()

    def taken(self, looks_ahead: int) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yield the batches of each window, and what they should be; look at later batches in the middle of each."""
        while (window := self.windows.take()) is not None:
            first = self.progress.batch_in_epoch
            batches, own = window[0], [row for row in self.rows[first : first + self.window] if row is not NO_BATCH]
            assert len(batches) == len(own)
            found = []
            for batch in batches:
                found.append(batch)
                coming = self.windows.coming(first + len(found))
                later = [each for each, _ in itertools.islice(coming, looks_ahead)]
                rest = [row for row in self.rows[first + self.window :] if row is not NO_BATCH]
                wanted = [*own[len(found) :], *rest][:looks_ahead]
                assert repr(later[: len(wanted)]) == repr(wanted)
            yield found, own
            self.progress.batch_in_epoch += window[1]
            if not window[1] or first + self.window >= len(self.rows):
                return


def loaders(kind: str, count: int) -> Any:
    long: DataLoader[Any] = DataLoader(range(count), batch_size=2)  # type: ignore[arg-type]
    short: DataLoader[Any] = DataLoader(range(100, 105), batch_size=1)  # type: ignore[arg-type]
    return {"one": long, "two": {"a": long, "b": short}, "list": [torch.tensor(i) for i in range(count)]}[kind]


@pytest.mark.parametrize("kind", ["one", "two", "list"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_windows_hold_the_batches_of_their_source(kind: str, size: int) -> None:
    for count, window, limit in itertools.product((11, 12, 13), (1, 3, 5), (None, 4)):
        for rank in range(size):
            for found, own in Source(loaders(kind, count), rank, size, window, limit).taken(looks_ahead=3):
                assert repr(found) == repr(own)


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_source_assures_the_batches_that_it_has(drop_last: bool) -> None:
    for count, size, start in itertools.product(range(9, 16), (1, 2, 3), (0, 4)):
        for rank in range(size):
            loader: DataLoader[Any] = DataLoader(range(count), batch_size=2, drop_last=drop_last)  # type: ignore[arg-type]
            source = prepare_training(loader, rank=rank, size=size, seed=1)
            position = {"samples": start}
            own = [batch for batch in source.start(0, position) if batch is not NO_BATCH]
            assert source.assured_batches() == source.batches_before(position) + len(own)


# ---- errors -------------------------------------------------------------------------------------------------------


def test_a_fit_resumes_exactly_after_an_error_of_its_data_within_a_window(tmp_path: Path) -> None:
    def fit(name: str, error: Exception | None, path: Any = None) -> Net:
        module = Net([], dropout=0.5)
        callback = OnExceptionCheckpoint(tmp_path / name, "error")
        trainer = quiet_trainer(tmp_path, callback, max_epochs=2, accumulate_grad_batches=3)
        trainer.fit(module, DataLoader(Noisy(9, [], 4, error), batch_size=1), ckpt_path=path)
        return module

    expected = weights_of(fit("none", None))
    with pytest.raises(RuntimeError, match="planted"):
        fit("saved", RuntimeError("planted"))
    resumed = fit("none", None, tmp_path / "saved" / "error.ckpt")
    assert resumed.events[0] == ("step", 3)
    assert torch.equal(weights_of(resumed), expected)


def test_data_that_ends_within_a_window_is_an_error() -> None:
    rows = Rows(6, [], 4, StopIteration())
    with refuses(DataError, "train_dataloaders", "6 batches"):
        silent_trainer(max_epochs=1, accumulate_grad_batches=3).fit(Net([]), DataLoader(rows, batch_size=1))


# ---- ranks that disagree -------------------------------------------------------------------------------------------


class Stream(IterableDataset[Tensor]):
    """Rows whose number no rank knows before it has read them."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Rows(48, []).rows)


def with_sizes(knows_length: bool, sizes: dict[int, dict[int, int]]) -> tuple[str, int]:
    """Fit with the schedule of this rank; return the error and the updates that were made."""
    schedule = AccumulationSchedule(sizes[torch.distributed.get_rank()], "step")
    trainer = silent_trainer(devices=2, max_epochs=1, accumulate_grad_batches=schedule)
    data: Dataset[Tensor] = Rows(48, []) if knows_length else Stream()
    with pytest.raises(DesyncError) as raised:
        trainer.fit(Net([]), DataLoader(data, batch_size=2))
    return str(raised.value), trainer.global_step


# Where one rank knows its weight before the others do, the error of another ends that process, which ends this one.
@pytest.mark.parametrize(("knows_length", "from_step"), [(True, 0), (False, 0), (False, 3), (False, 6)])
def test_ranks_with_windows_of_different_sizes_are_refused(knows_length: bool, from_step: int) -> None:
    sizes = {0: {0: 1}, 1: {0: 1, from_step: 2}}
    for message, updates in run_on_ranks(2, with_sizes, knows_length, sizes):
        says(message, "accumulate_grad_batches", "1.5")
        assert updates == from_step
