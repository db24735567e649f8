"""``Packed``: sequences of one length, whose loss is that of the documents one by one, resumed at the same sequence."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from library_streams import loader, read_by_ranks
from messages import refuses
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from phalanx import Packed
from phalanx.framework.checkpoint.codec import decode, encode_inline
from phalanx.framework.core.errors import ConfigurationError, DataError
from phalanx.framework.data.packing import best_fit

EOS = 1


def documents(count: int = 23, most: int = 30, seed: int = 0) -> list[list[int]]:
    """Return documents of distinct tokens, so that each token has one place."""
    draw = random.Random(seed)
    tokens = iter(range(100, 100_000))
    return [[next(tokens) for _ in range(draw.randint(1, most))] for _ in range(count)]


class Stream(IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        yield from self.items


class Stateful(Stream):
    """The same, with a state that resumes without reading again."""

    first = now = reads = 0

    def __iter__(self) -> Iterator[Any]:
        begin, self.first = self.first, 0
        for place in range(begin, len(self.items)):
            self.now = place + 1
            self.reads += 1
            yield self.items[place]

    def state_dict(self) -> dict[str, Any]:
        return {"now": self.now}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["now"]


def every(packed: Any) -> list[dict[str, Tensor]]:
    """Return all sequences of a map-style or an iterable one."""
    return list(packed) if isinstance(packed, IterableDataset) else [packed[index] for index in range(len(packed))]


def pieces(sequence: dict[str, Tensor]) -> list[list[int]]:
    """Return the tokens of each document of a sequence, padding left out."""
    ids = sequence["document_ids"]
    return [sequence["input_ids"][ids == number].tolist() for number in range(int(ids.max()) + 1)]


def check_fields(sequence: dict[str, Tensor], length: int) -> None:
    """Compare labels and positions with those written by hand."""
    labels, positions = [], []
    for piece in pieces(sequence):
        labels += [-100, *piece[1:]]
        positions += list(range(len(piece)))
    rest = length - len(labels)
    assert sequence["labels"].tolist() == labels + [-100] * rest
    assert sequence["position_ids"].tolist() == positions + [0] * rest
    # Documents are numbered in their order, and padding comes last.
    assert [*sequence["document_ids"].tolist()] == sorted(
        sequence["document_ids"].tolist(), key=lambda each: each % 999
    )
    assert {each.dtype for each in sequence.values()} == {torch.int64}
    assert {tuple(each.shape) for each in sequence.values()} == {(length,)}


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.parametrize("eos", [None, EOS])
@pytest.mark.parametrize("length", [1, 7, 16, 64, 5000])
def test_cut_sequences_are_the_documents_one_after_the_other(kind: Any, eos: int | None, length: int) -> None:
    given = documents()
    flat = [token for each in given for token in [*each, *([] if eos is None else [eos])]]
    sequences = every(Packed(kind(given), length, eos=eos, pad=9))
    assert len(sequences) == -(-len(flat) // length)
    padded = flat + [9] * (len(sequences) * length - len(flat))
    assert torch.cat([each["input_ids"] for each in sequences]).tolist() == padded
    for each in sequences:
        check_fields(each, length)


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.parametrize("length", [31, 40, 100])
def test_whole_documents_come_once_each_in_few_sequences(kind: Any, length: int) -> None:
    given = documents(60)
    sequences = every(Packed(kind(given), length, eos=EOS, cut=False))
    found = [piece for each in sequences for piece in pieces(each)]
    assert sorted(found) == sorted([*each, EOS] for each in given)
    least = -(-sum(len(each) + 1 for each in given) // length)
    assert len(sequences) <= least * (11 / 9 if kind is list else 1.5) + 1
    for each in sequences:
        check_fields(each, length)


def test_best_fit_takes_the_fullest_bin_with_room() -> None:
    assert best_fit([6, 5, 4, 3, 2], 10) == [[0, 2], [1, 3, 4]]
    assert best_fit([7, 6, 3, 4], 10) == [[0, 2], [1, 3]]
    draw = random.Random(1)
    for _ in range(50):
        sizes = sorted((draw.randint(1, 20) for _ in range(draw.randint(1, 40))), reverse=True)
        by_hand: list[list[int]] = []
        for place, size in enumerate(sizes):
            fitting = [each for each in by_hand if sum(sizes[k] for k in each) + size <= 20]
            fullest = max(fitting, key=lambda each: sum(sizes[k] for k in each), default=None)
            (by_hand.append([place]) if fullest is None else fullest.append(place))
        found = best_fit(sizes, 20)
        assert sorted(sum(sizes[k] for k in each) for each in found) == sorted(
            sum(sizes[k] for k in each) for each in by_hand
        )
        assert sorted(chain(*found)) == list(range(len(sizes)))


@pytest.mark.parametrize("cut", [True, False])
def test_an_epoch_has_its_own_order_and_each_the_same_length(cut: bool) -> None:
    packed = Packed(documents(), 32, eos=EOS, cut=cut, shuffle=True, seed=4)
    epochs = []
    for epoch in (0, 1, 0):
        packed.set_epoch(epoch)
        epochs.append([each["input_ids"].tolist() for each in every(packed)])
    assert epochs[0] == epochs[2] != epochs[1]
    assert len(epochs[0]) == len(epochs[1])
    tokens = [sorted(token for each in epoch for token in each if token > EOS) for epoch in epochs]
    assert tokens[0] == tokens[1] == sorted(chain(*documents()))


@pytest.mark.parametrize("workers", [0, 2])
def test_ranks_and_workers_do_not_change_the_sequences(workers: int) -> None:
    packed = Packed(documents(40), 32, cut=False, shuffle=True)
    packed.set_epoch(3)
    wanted = [each["input_ids"].tolist() for each in every(packed)]

    def rows(size: int, position: Any = None) -> list[list[int]]:
        batches = read_by_ranks(loader(packed, workers), size, 3, position)
        return [row for batch in batches for row in batch["input_ids"].tolist()]

    for size in (1, 2, 3) if workers == 0 else (2,):
        assert rows(size) == wanted
        assert rows(size, {"samples": 4}) == wanted[4:]


@pytest.mark.parametrize("kind", [Stream, Stateful])
@pytest.mark.parametrize("cut", [True, False])
def test_a_packed_stream_resumes_after_each_sequence(kind: Any, cut: bool) -> None:
    def packed(dataset: Any) -> Any:
        return Packed(dataset, 32, eos=EOS, cut=cut)

    whole = [each["input_ids"].tolist() for each in packed(kind(documents(40)))]
    for consumed in range(len(whole) + 1):
        read, dataset = kind(documents(40)), kind(documents(40))
        first, again = packed(read), packed(dataset)
        sequences = iter(first)
        for _ in range(consumed):
            next(sequences)
        state = decode(json.loads(json.dumps(encode_inline(first.state_dict()))))
        again.load_state_dict(state)
        assert [each["input_ids"].tolist() for each in again] == whole[consumed:]
        if kind is Stateful:
            assert dataset.reads == 40 - read.now, "what has been read is read again"
    again.set_epoch(1)
    again.load_state_dict(state)
    assert len(list(again)) == len(whole)


class Attention(nn.Module):
    """One head of causal attention over tokens and positions, limited to documents if these are given."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 8), nn.Embedding(64, 8)
        self.mix, self.head = nn.Linear(8, 24), nn.Linear(8, 50)

    def forward(self, batch: dict[str, Tensor], is_limited: bool = True) -> Tensor:
        ids, documents = batch["input_ids"], batch["document_ids"]
        query, key, value = self.mix(self.tokens(ids) + self.positions(batch["position_ids"])).chunk(3, -1)
        mask = torch.ones(ids.shape[-1], ids.shape[-1], dtype=torch.bool).tril()
        if is_limited:
            mask = mask & (documents[:, :, None] == documents[:, None, :])
        logits = self.head(nn.functional.scaled_dot_product_attention(query, key, value, mask))
        shifted = batch["labels"][:, 1:].flatten()
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), shifted, ignore_index=-100, reduction="sum")


def test_a_packed_loss_is_the_sum_of_the_losses_of_the_documents() -> None:
    torch.manual_seed(0)
    model = Attention()
    given = [torch.randint(2, 50, (length,)).tolist() for length in [5, 9, 1, 14, 3, 8, 2]]
    packed = Packed(given, 16, eos=EOS, cut=False)
    batch = {name: torch.stack([each[name] for each in every(packed)]) for name in packed[0]}
    single = [Packed([each], len(each) + 1, eos=EOS)[0] for each in given]
    alone = torch.stack([model({name: tensor[None] for name, tensor in each.items()}) for each in single])
    torch.testing.assert_close(model(batch), alone.sum())
    assert not torch.allclose(model(batch, is_limited=False), alone.sum())


def test_labels_of_a_sample_are_kept_and_boundaries_are_counted() -> None:
    samples = [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    packed = Packed(samples, 8, eos=EOS)
    assert packed[0]["labels"].tolist() == [-100, -100, 7, EOS, -100, 9, EOS, -100]
    assert Packed.cu_seqlens(packed[0]["document_ids"]).tolist() == [0, 4, 7, 8]
    two = torch.stack([torch.tensor([0, 0, 1]), torch.tensor([1, 1, 1])])
    assert Packed.cu_seqlens(two).tolist() == [0, 2, 3, 6]
    assert Packed.cu_seqlens(two).dtype == torch.int32


def test_given_lengths_save_reading_all_documents() -> None:
    class Counted(list[Any]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    given = Counted(documents())
    packed = Packed(given, 16, lengths=[len(each) for each in documents()])
    assert given.reads == 0
    assert packed[3]["input_ids"].tolist() == Packed(documents(), 16)[3]["input_ids"].tolist()
    assert given.reads < 18


@pytest.mark.parametrize(
    ("data", "options", "name"),
    [
        ([[1] * 9, [1] * 20], {"cut": False}, "document 1"),
        ([[1] * 16], {"cut": False, "eos": 1}, "17 tokens"),
        ([], {}, "Packed"),
        ([[1], []], {}, "sample 1"),
        ([[1]], {"lengths": [1, 2]}, "2 lengths"),
        (Stream([[1]]), {"lengths": [1]}, "lengths"),
        (iter([[1]]), {}, "list_iterator"),
        (5, {}, "int"),
    ],
)
def test_what_cannot_be_packed_is_refused(data: Any, options: Any, name: str) -> None:
    with refuses(ConfigurationError, name):
        Packed(data, 16, **options)
    for length in (0, "50", 1.5):
        with refuses(ConfigurationError, f"length={length!r}"):
            Packed([[1]], length)  # type: ignore[arg-type]


def test_rows_of_a_tensor_dataset_are_documents() -> None:
    rows = torch.arange(12).reshape(3, 4)
    packed = Packed(TensorDataset(rows), 6)
    assert len(packed) == 2
    assert [each["input_ids"].tolist() for each in every(packed)] == [list(range(6)), list(range(6, 12))]
    assert every(Packed(Stream([(row,) for row in rows]), 6))[1]["input_ids"].tolist() == list(range(6, 12))


def test_documents_that_do_not_fit_are_errors() -> None:
    with refuses(DataError, "length=16"):
        every(Packed(Stream([[1] * 20]), 16, cut=False))
    with refuses(DataError, "document 0", "3 tokens"):
        Packed([[1, 2, 3]], 4, lengths=[2])[0]
    with refuses(DataError, "Packed"):
        every(Packed(Stream([]), 4))
    with refuses(DataError, "'input_ids'", "'input_id'"):
        every(Packed(Stream([{"input_id": [1]}]), 4))
    with refuses(DataError, "[1, 2]"):
        every(Packed(Stream([[[1, 2]]]), 4))
    with refuses(DataError, "str", "'input_ids'"):
        Packed(["hello"], 4)
    with refuses(DataError, "tuple", "'labels'"):
        Packed([([1, 2], 0)], 4)
    with refuses(DataError, "2 tokens", "1 labels"):
        every(Packed(Stream([{"input_ids": [1, 2], "labels": [1]}]), 4))
