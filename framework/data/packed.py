"""``Packed``: documents of any length as sequences of one length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, DataError, is_count
from ..core.position_rng import mix_seed
from .item_reader import ItemReader, check_dataset, has_indices
from .orders import permutation
from .packing import Cutter, Filler, Piece, best_fit, document_of, sequence_of
from .token_lengths import lengths_of

_SEQUENCES = 1
"""Distinguishes the seed of the order of the sequences from that of the documents."""

Sample = dict[str, Tensor]


class Packed(Dataset[Sample]):
    """Sequences of ``length`` tokens, made of the documents of a dataset.

    A sample is a dict of int64 tensors of shape ``[length]``: ``input_ids``; ``labels``, not shifted, which are -100 in
    padding and at the first token of each document; ``position_ids``, which begin at 0 in each document; and
    ``document_ids``, which are -1 in padding. Attention between tokens of equal ``document_ids`` computes what the
    documents give one by one.

    Over a map-style dataset it is map-style: a sequence is a function of the seed, the epoch and its index alone,
    whatever the numbers of ranks and workers. Over an iterable dataset it is an ``IterableDataset`` with ``state_dict``
    and ``load_state_dict``, which hold the tokens that wait for their sequence. ``phalanx`` calls ``set_epoch``.

    Args:
        dataset: documents: sequences of integers, alone or in tuples of one; or dicts with ``"input_ids"`` and possibly
            ``"labels"``.
        length: the number of tokens of a sequence.
        eos: a token that is appended to each document, or None.
        cut: put documents one after the other and cut them into sequences: only the last is padded. Else keep each
            document in one piece, in the fullest sequence that has room for it.
        pad: the token of padding.
        shuffle: put the documents together in another order in each epoch.
        seed: the seed of that order.
        lengths: the number of tokens of each document, without ``eos``. If not given, all samples of a map-style
            dataset are read once.

    Raises:
        ConfigurationError: a document is longer than ``length`` and ``cut=False``, or the dataset is empty.
        DataError: a document is not a sequence of integers.
    """

    def __new__(cls, dataset: Any = (), *args: Any, **options: Any) -> Packed:
        return super().__new__(cls if has_indices(dataset) else PackedStream)

    @names_arguments
    def __init__(
        self,
        dataset: Any,
        length: int,
        *,
        eos: int | None = None,
        cut: bool = True,
        pad: int = 0,
        shuffle: bool = False,
        seed: int = 0,
        lengths: Any = None,
    ) -> None:
        if not is_count(length, 1):
            raise ConfigurationError(f"length={length!r} of Packed must be a whole number of at least 1 token.")
        check_dataset(dataset, "the dataset of Packed")
        self.length = length
        self.cut = cut
        self._data = dataset
        self._eos = eos
        self._pad = pad
        self._seed = seed
        self._shuffle = shuffle
        # Shared with workers that persist from epoch to epoch, and hold a copy of this object.
        self._shared_epoch = torch.zeros((), dtype=torch.int64).share_memory_()
        self._arrange(lengths)

    def _arrange(self, lengths: Any) -> None:
        """Prepare the arrangement of all epochs."""
        if lengths is None:
            # Refuses documents that cannot be packed before all of them are measured.
            document_of(self._data[0], self._eos)
        given = lengths_of(self._data if lengths is None else lengths, "Packed")
        if len(given) != len(self._data):
            raise ConfigurationError(f"Packed got {len(given)} lengths for {len(self._data)} documents.")
        sizes = [each + (self._eos is not None) for each in given]
        if not self.cut and max(sizes) > self.length:
            longest = sizes.index(max(sizes))
            raise ConfigurationError(
                f"document {longest} has {sizes[longest]} tokens, more than length={self.length}, and cut=False: raise "
                "length, pass cut=True, or leave out such documents."
            )
        self._sizes = torch.tensor(sizes)
        # Documents of the same size may change places without changing the sequences' sizes, hence their number.
        self._bins = None if self.cut else best_fit(sorted(sizes, reverse=True), self.length)
        self._planned = -1
        self._plan()

    def set_epoch(self, epoch: int) -> None:
        """Select the order of an epoch."""
        self._shared_epoch.fill_(epoch)
        if callable(inform := getattr(self._data, "set_epoch", None)):
            inform(epoch)

    @property
    def epoch(self) -> int:
        """The epoch of ``set_epoch``, 0 at first."""
        return int(self._shared_epoch)

    @staticmethod
    def cu_seqlens(document_ids: Tensor) -> Tensor:
        """Return the boundaries of all documents of a batch, for attention over sequences of variable length.

        Args:
            document_ids: of shape ``[length]`` or ``[batch, length]``; a run of padding counts as a document.

        Returns:
            An int32 tensor of shape ``[documents + 1]``: 0, and the end of each document in the flattened batch.
        """
        rows = document_ids.reshape(-1, document_ids.shape[-1])
        begins = torch.ones_like(rows, dtype=torch.bool)
        begins[:, 1:] = rows[:, 1:] != rows[:, :-1]
        ends = torch.tensor([rows.numel()], device=rows.device)
        return torch.cat([begins.flatten().nonzero().flatten(), ends]).int()

    def _plan(self) -> None:
        """Compute the order of the epoch, unless it is known."""
        epoch = self.epoch
        if self._planned == epoch or (self._planned >= 0 and not self._shuffle):
            return
        count = len(self._sizes)
        order = torch.tensor(permutation(count, self._seed, epoch)) if self._shuffle else torch.arange(count)
        if self._bins is None:
            self._order, self._ends = order, self._sizes[order].cumsum(0)
        else:
            self._order = order[self._sizes[order].argsort(descending=True, stable=True)]
            seed = mix_seed(self._seed, _SEQUENCES)
            self._sequences: Sequence[int] = range(len(self._bins))
            if self._shuffle:
                self._sequences = permutation(len(self._bins), seed, epoch)
        self._planned = epoch

    def __len__(self) -> int:
        return int(-(-self._sizes.sum() // self.length)) if self._bins is None else len(self._bins)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"index {index} is not in a dataset of {len(self)} sequences")
        self._plan()
        if self._bins is None:
            return sequence_of(self._cut(index * self.length), self.length, self._pad)
        places = self._bins[self._sequences[index]]
        return sequence_of([self._document(place) for place in places], self.length, self._pad)

    def _cut(self, begin: int) -> Iterator[Piece]:
        """Yield the pieces of the sequence that begins at token ``begin``."""
        end = begin + self.length
        place = int(torch.searchsorted(self._ends, begin, right=True))
        while begin < end and place < len(self._ends):
            tokens, labels = self._document(place)
            offset = begin - int(self._ends[place]) + len(tokens)
            part = slice(offset, offset + end - begin)
            yield tokens[part], labels[part]
            begin, place = int(self._ends[place]), place + 1

    def _document(self, place: int) -> Piece:
        number = int(self._order[place])
        document = document_of(self._data[number], self._eos)
        if len(document[0]) != int(self._sizes[number]):
            raise DataError(
                f"document {number} of Packed has {len(document[0])} tokens where its length says "
                f"{int(self._sizes[number])}, with eos: give the lengths of the documents as they are read."
            )
        return document


class PackedStream(Packed, IterableDataset[Sample]):
    """``Packed`` over an iterable dataset: an ``IterableDataset`` whose state resumes it at the same sequence."""

    _restored: dict[str, Any] | None = None

    def _arrange(self, lengths: Any) -> None:
        if lengths is not None:
            raise ConfigurationError("Packed got lengths for an iterable dataset, which reads them: leave them out.")
        self._reader = ItemReader(self._data, "the dataset of Packed", self._seed, self._shuffle)
        self._arranger = self._new_arranger()

    def _new_arranger(self, bins: list[list[Piece]] | None = None) -> Cutter | Filler:
        return Cutter(self.length, bins) if self.cut else Filler(self.length, bins)

    def __len__(self) -> int:
        raise TypeError("Packed over an iterable dataset has no length")

    def __getitem__(self, index: int) -> Sample:
        raise TypeError("Packed over an iterable dataset is iterable itself and has no indices")

    def __iter__(self) -> Iterator[Sample]:
        state, self._restored = self._restored, None
        if state is not None and state["epoch"] != self.epoch:
            state = None
        waiting = None
        if state is not None:
            waiting = [[(tokens, labels) for tokens, labels in pieces] for pieces in state["waiting"]]
        self._arranger = self._new_arranger(waiting)
        self._reader.start(self.epoch, None if state is None else state["reader"])
        return self._read()

    def _read(self) -> Iterator[Sample]:
        at_end = False
        while True:
            pieces = self._arranger.take(at_end)
            if pieces is not None:
                yield sequence_of(pieces, self.length, self._pad)
            elif at_end:
                return
            else:
                try:
                    document = document_of(next(self._reader), self._eos)
                except StopIteration:
                    at_end = True
                    continue
                if len(document[0]):
                    self._arranger.add(document)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last sequence, the tokens that wait, and the dataset's own state."""
        waiting = [[list(piece) for piece in pieces] for pieces in self._arranger.bins]
        return {"epoch": self.epoch, "reader": self._reader.state_dict(), "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from a state, if it is of the same epoch."""
        self._restored = state
