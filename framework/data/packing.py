"""Packing of documents into sequences of one length: the arrangement, and the tensors of a sequence."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.errors import DataError
from .token_lengths import as_tokens, tokens_of

IGNORED = -100
"""The label of a token that is not a target, as ``cross_entropy`` has it."""
PADDING = -1
"""The document number of padding."""
_MOST_OPEN = 16

Piece = tuple[Tensor, Tensor]
"""Tokens and labels of a document or of a part of it, each of shape ``[tokens]``."""


def document_of(sample: Any, eos: int | None) -> Piece:
    """Return the tokens and the labels of a sample, with ``eos`` after both. Labels are the tokens unless given.

    Raises:
        DataError: the sample has no sequence of integers, labels of another length, or fields without names.
    """
    if isinstance(sample, tuple) and len(sample) > 1 and tokens_of(sample) is not sample:
        raise DataError(
            f"a sample is a tuple of {len(sample)} fields, of which only tokens and labels can be packed: give dicts "
            "with 'input_ids' and possibly 'labels'."
        )
    tokens = as_tokens(tokens_of(sample))
    labels = as_tokens(sample["labels"]) if isinstance(sample, Mapping) and "labels" in sample else tokens
    if len(labels) != len(tokens):
        raise DataError(f"a sample has {len(tokens)} tokens and {len(labels)} labels: give one label for each token.")
    if eos is None:
        return tokens, labels
    end = torch.tensor([eos])
    return torch.cat([tokens, end]), torch.cat([labels, end])


def sequence_of(pieces: Iterable[Piece], length: int, pad: int) -> dict[str, Tensor]:
    """Return pieces one after the other as a sequence of ``length`` tokens, padded at the end.

    Returns:
        int64 tensors of shape ``[length]``: ``input_ids``; ``labels``, which are not shifted and are -100 in padding
        and at the first token of each piece, which no token of its document precedes; ``position_ids``, which begin at
        0 in each piece; and ``document_ids``, the number of the piece in the sequence, -1 in padding.
    """
    input_ids, labels = torch.full((length,), pad), torch.full((length,), IGNORED)
    position_ids, document_ids = torch.zeros(length, dtype=torch.int64), torch.full((length,), PADDING)
    begin = 0
    for number, (tokens, targets) in enumerate(pieces):
        end = begin + len(tokens)
        input_ids[begin:end] = tokens
        labels[begin + 1 : end] = targets[1:]
        position_ids[begin:end] = torch.arange(len(tokens))
        document_ids[begin:end] = number
        begin = end
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "document_ids": document_ids}


def best_fit(sizes: Sequence[int], length: int) -> list[list[int]]:
    """Return bins of at most ``length``, each as a list of places in ``sizes``.

    Each item goes into the fullest bin that has room for it. With sizes in descending order the bins need at most 11/9
    of the smallest number of bins possible, and often no more.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []
    for place, size in enumerate(sizes):
        found = bisect_left(rooms, size)
        if found == len(rooms):
            bins.append([place])
            room, chosen = length - size, len(bins) - 1
        else:
            former = rooms[found]
            chosen = by_room[former].pop()
            if not by_room[former]:
                del by_room[former], rooms[found]
            bins[chosen].append(place)
            room = former - size
        if room not in by_room:
            by_room[room] = []
            insort(rooms, room)
        by_room[room].append(chosen)
    return bins


class Cutter:
    """Arranges a stream of documents: one after the other, cut at each multiple of ``length``."""

    def __init__(self, length: int, bins: list[list[Piece]] | None = None) -> None:
        """``bins``: the documents that wait, from an earlier one."""
        self.bins: list[list[Piece]] = [[]] if bins is None else bins
        self._length = length

    def add(self, document: Piece) -> None:
        """Append a document to the tokens that wait for their sequence."""
        self.bins[0].append(document)

    def take(self, at_end: bool) -> list[Piece] | None:
        """Return the pieces of the next sequence, or None if more documents are needed, or at the end if none is left.

        Args:
            at_end: whether no document follows, so that a sequence may be short.
        """
        waiting = self.bins[0]
        if not waiting or (not at_end and sum(len(tokens) for tokens, _ in waiting) < self._length):
            return None
        taken: list[Piece] = []
        room = self._length
        while waiting and room:
            tokens, labels = waiting.pop(0)
            taken.append((tokens[:room], labels[:room]))
            if len(tokens) > room:
                waiting.insert(0, (tokens[room:], labels[room:]))
            room -= len(taken[-1][0])
        return taken


class Filler:
    """Arranges a stream of documents into whole sequences, of which a number are open at a time.

    A document goes into the fullest open sequence that has room for it. If none has and the most are open, the fullest
    is given out.
    """

    def __init__(self, length: int, bins: list[list[Piece]] | None = None) -> None:
        """``bins``: the open sequences of an earlier one."""
        self.bins: list[list[Piece]] = [] if bins is None else bins
        self._length = length

    def add(self, document: Piece) -> None:
        """Put a document into an open sequence."""
        if len(document[0]) > self._length:
            raise DataError(
                f"a document has {len(document[0])} tokens, more than length={self._length}, and cut=False: raise "
                "length, pass cut=True, or leave out such documents."
            )
        fitting = [each for each in self.bins if self._size(each) + len(document[0]) <= self._length]
        if fitting:
            max(fitting, key=self._size).append(document)
        else:
            self.bins.append([document])

    def take(self, at_end: bool) -> list[Piece] | None:
        """Return the pieces of the next sequence, as ``Cutter.take`` does."""
        fullest = max(range(len(self.bins)), key=lambda each: self._size(self.bins[each]), default=None)
        if fullest is None:
            return None
        is_due = at_end or len(self.bins) > _MOST_OPEN or self._size(self.bins[fullest]) == self._length
        return self.bins.pop(fullest) if is_due else None

    @staticmethod
    def _size(pieces: Sequence[Piece]) -> int:
        return sum(len(tokens) for tokens, _ in pieces)
