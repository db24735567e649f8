"""``BatchByTokens``: batches within their size, the same on any number of ranks, and an exact mean over tokens."""

from __future__ import annotations

import random
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from library_streams import read_by_ranks
from messages import refuses
from ranks import run_on_ranks
from small_fits import quiet_trainer
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from phalanx import BatchByTokens, TrainModule
from phalanx.framework.core.errors import ConfigurationError, DataError
from phalanx.framework.data.token_lengths import lengths_of


def random_lengths(count: int, most: int = 60, seed: int = 0) -> list[int]:
    return [random.Random(seed + place).randint(1, most) for place in range(count)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("count", "max_tokens"), [(1, 60), (2, 10_000), (17, 61), (400, 256)])
def test_each_sample_comes_once_in_batches_within_their_size(count: int, max_tokens: int, shuffle: bool) -> None:
    lengths = random_lengths(count)
    sampler = BatchByTokens(lengths, max_tokens=max_tokens, shuffle=shuffle, seed=3)
    for epoch in (0, 1, 7):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert batches == list(sampler)
        assert len(batches) == len(sampler)
        assert sorted(chain(*batches)) == list(range(count))
        assert all(max(lengths[each] for each in batch) * len(batch) <= max_tokens for batch in batches)


def test_batches_hold_similar_lengths_and_differ_by_epoch_and_seed() -> None:
    lengths = random_lengths(3000, 200)
    sampler = BatchByTokens(lengths, max_tokens=2000)
    batches = list(sampler)
    # All samples, without the padding of the batches, take at least nine tenths of the room.
    assert sum(lengths) > 0.9 * sum(max(lengths[each] for each in batch) * len(batch) for batch in batches)
    sampler.set_epoch(1)
    other = list(sampler)
    assert {frozenset(each) for each in batches} != {frozenset(each) for each in other}
    assert [len(each) for each in other] != sorted(len(each) for each in other)
    assert list(BatchByTokens(lengths, max_tokens=2000, seed=1)) != batches
    in_order = [lengths[each] for each in chain(*BatchByTokens(lengths, max_tokens=2000, shuffle=False))]
    assert in_order == sorted(lengths, reverse=True)


def test_a_sample_of_the_largest_size_is_a_batch_of_its_own() -> None:
    assert sorted(BatchByTokens([61, 3, 61], max_tokens=61)) == [[0], [1], [2]]


def test_drop_last_leaves_out_a_batch_that_is_not_full() -> None:
    assert list(BatchByTokens([4, 4, 2], max_tokens=8, shuffle=False)) == [[0, 1], [2]]
    assert list(BatchByTokens([4, 4, 2], max_tokens=8, shuffle=False, drop_last=True)) == [[0, 1]]
    assert list(BatchByTokens([4, 4, 4, 4], max_tokens=8, shuffle=False, drop_last=True)) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("given", [[3, 1, 2], torch.tensor([3, 1, 2]), torch.tensor([3, 1, 2]).numpy()])
def test_lengths_are_given_or_measured(given: Any) -> None:
    wanted = list(BatchByTokens([3, 1, 2], max_tokens=4, seed=5))
    assert list(BatchByTokens(given, max_tokens=4, seed=5)) == wanted
    documents = [torch.arange(3), torch.arange(1), torch.arange(2)]
    assert list(BatchByTokens(documents, max_tokens=4, seed=5)) == wanted
    assert list(BatchByTokens([{"input_ids": each.tolist()} for each in documents], max_tokens=4, seed=5)) == wanted


@pytest.mark.parametrize(
    "rows",
    [
        TensorDataset(torch.zeros(3, 7)),
        TensorDataset(torch.zeros(3, 7, dtype=torch.int64), torch.zeros(3)),
        [([1] * 7, 1), ([2] * 7, 0)],
        [(torch.arange(7), torch.arange(7))] * 2,
        [tuple(range(7))] * 2,
        [tuple(torch.arange(7))] * 2,
        [range(7), bytes(7)],
        [{"input_ids": torch.arange(7), "label": 1}] * 2,
    ],
)
def test_a_sample_is_as_long_as_its_sequence_of_numbers(rows: Any) -> None:
    assert lengths_of(rows, "BatchByTokens") == [7] * len(rows)


@pytest.mark.parametrize(
    ("sample", "found"),
    [
        ({"input_ids": torch.zeros(1, 7)}, "[1, 7]"),
        ((1, torch.arange(7)), "a int as tokens"),
        ("hello world", "a str as tokens"),
        ([[1, 2, 3]], "a list as tokens that begins with a list"),
        (object(), "a object as tokens"),
    ],
)
def test_a_length_that_is_not_clear_is_refused(sample: Any, found: str) -> None:
    rows = [torch.arange(3), sample]
    with refuses(DataError, "BatchByTokens", found):
        BatchByTokens(rows, max_tokens=100)


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_share_the_batches_and_resume_after_any(workers: int) -> None:
    lengths, data = random_lengths(50), torch.arange(50)

    def rows(size: int, position: Any = None) -> list[list[int]]:
        sampler = BatchByTokens(lengths, max_tokens=150)
        loader: Any = DataLoader(data, batch_sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
        return [batch.tolist() for batch in read_by_ranks(loader, size, 4, position)]

    sampler = BatchByTokens(lengths, max_tokens=150)
    sampler.set_epoch(4)
    wanted = list(sampler)
    for size in (1, 2, 3) if workers == 0 else (2,):
        assert rows(size) == wanted
        assert rows(size, {"batches": 6}) == wanted[6:]


class NextToken(TrainModule):
    """Predicts a token from the one before it; the mean is over all tokens of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 7))

    def batch_weight(self, batch: Tensor) -> Tensor:
        return (batch[:, 1:] >= 0).sum()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.net(batch[:, :-1].clamp(min=0))
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=-1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(7, (length,), generator=generator) for length in [2, 3, 3, 9, 14, 4, 6, 2, 20, 11, 5]]


def pad(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=-1)


def fit(root: str, window: int) -> Tensor:
    model = NextToken()
    sampler = BatchByTokens(documents(), max_tokens=20, seed=1)
    loader: Any = DataLoader(documents(), batch_sampler=sampler, collate_fn=pad)  # type: ignore[arg-type]
    trainer = quiet_trainer(
        Path(root), [], devices="auto", strategy="ddp", max_epochs=2, accumulate_grad_batches=window
    )
    trainer.fit(model, loader)
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize("ranks", [1, 3])
def test_with_batch_weight_an_update_is_the_mean_over_all_tokens(tmp_path: Path, ranks: int) -> None:
    by_hand, data = NextToken(), documents()
    optimizer = by_hand.configure_optimizers()
    sampler = BatchByTokens(data, max_tokens=20, seed=1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        for begin in range(0, len(batches), 2 * ranks):
            together = pad([data[each] for each in chain(*batches[begin : begin + 2 * ranks])])
            optimizer.zero_grad()
            by_hand.training_step(together, 0).backward()
            optimizer.step()
    wanted = torch.cat([each.detach().flatten() for each in by_hand.parameters()])
    for found in run_on_ranks(ranks, fit, str(tmp_path), 2):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "name"),
    [
        ([3, 9], 8, "max_tokens=8"),
        ([3, 0], 8, "0 tokens"),
        ([], 8, "BatchByTokens"),
        ([3], 0, "max_tokens=0"),
        (iter([3]), 8, "list_iterator"),
        ([5.0, 3.0], 8, "5.0"),
        ([5, 3.5], 8, "3.5"),
        ([3], 10.5, "max_tokens=10.5"),
    ],
)
def test_what_cannot_be_batched_is_refused(lengths: Any, max_tokens: Any, name: str) -> None:
    with refuses(ConfigurationError, name):
        BatchByTokens(lengths, max_tokens=max_tokens)


def test_a_missing_key_names_the_closest() -> None:
    with refuses(DataError, "'input_ids'", "'input_id'"):
        BatchByTokens([{"input_id": [1]}], max_tokens=4)
