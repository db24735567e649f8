"""``BatchByTokens``: batches of samples of similar lengths, limited by their padded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Sampler

from ..core.arguments import names_arguments
from ..core.errors import ConfigurationError, is_count
from ..core.position_rng import mix_seed
from .orders import permutation
from .token_lengths import lengths_of

_BATCHES = 1
"""Distinguishes the seed of the order of the batches from that of the samples."""


class BatchByTokens(Sampler[list[int]]):
    """A batch sampler whose batches hold samples of similar lengths, as many as fit.

    A batch's size when padded, its longest sample times its number of samples, is at most ``max_tokens``. The number of
    batches is the same in each epoch. Batches are a function of the seed and the epoch; ``phalanx`` calls
    ``set_epoch``, gives each rank an equal number of them, and resumes after any.

    The batches differ in their numbers of samples and tokens. For the mean over all tokens on any number of ranks,
    return the number of tokens from ``TrainModule.batch_weight``.

    Args:
        lengths: the length of each sample in tokens, as integers; or a map-style dataset, all samples of which are read
            once: sequences of numbers, tuples that begin with one, or dicts with one as ``"input_ids"``.
        max_tokens: the largest padded size of a batch, in tokens.
        shuffle: draw other batches in another order in each epoch, from samples whose lengths differ by up to a
            sixteenth; else begin with the longest samples.
        seed: the seed of the order.
        drop_last: leave out the batch of the shortest samples if another one of that length would fit into it.

    Raises:
        ConfigurationError: a sample is longer than ``max_tokens``, or there is no sample.
        DataError: the length of a sample is not clear, such as that of a text or of a tensor of two dimensions.
    """

    @names_arguments
    def __init__(
        self, lengths: Any, *, max_tokens: int, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        if not is_count(max_tokens, 1):
            raise ConfigurationError(
                f"max_tokens={max_tokens!r} of BatchByTokens must be a whole number of at least 1."
            )
        self.max_tokens = max_tokens
        self.shuffle = shuffle
        self.epoch = 0
        self._seed = seed
        # Samples of the same size may change places without changing the batches' sizes, hence their number.
        self._sizes = [
            _rounded_up(length, max_tokens) if shuffle else length for length in _checked(lengths, max_tokens)
        ]
        self._bounds = _bounds(sorted(self._sizes, reverse=True), max_tokens, drop_last)

    def set_epoch(self, epoch: int) -> None:
        """Select the batches of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._bounds)

    def __iter__(self) -> Iterator[list[int]]:
        order: Sequence[int] = range(len(self._sizes))
        batches: Sequence[int] = range(len(self._bounds))
        if self.shuffle:
            order = permutation(len(order), self._seed, self.epoch)
            batches = permutation(len(batches), mix_seed(self._seed, _BATCHES), self.epoch)
        # Stable: samples of the same size stay in their order.
        by_size = sorted(order, key=lambda sample: -self._sizes[sample])
        return (by_size[slice(*self._bounds[batch])] for batch in batches)


def _checked(lengths: Any, max_tokens: int) -> list[int]:
    found = lengths_of(lengths, "BatchByTokens")
    if max(found) > max_tokens:
        longest = found.index(max(found))
        raise ConfigurationError(
            f"sample {longest} has {found[longest]} tokens, more than max_tokens={max_tokens}: raise max_tokens, or "
            "cut or leave out such samples."
        )
    return found


def _rounded_up(length: int, most: int) -> int:
    """Return the length, rounded up by at most a sixteenth of it, and not above ``most``."""
    step = 1 << max(length.bit_length() - 5, 0)
    return min(-(-length // step) * step, most)


def _bounds(sizes: Sequence[int], max_tokens: int, drop_last: bool) -> list[tuple[int, int]]:
    """Return the begin and the end of each batch among samples in descending order of size."""
    bounds = []
    begin = 0
    while begin < len(sizes):
        fitting = max_tokens // sizes[begin]
        if drop_last and begin + fitting > len(sizes):
            break
        bounds.append((begin, min(begin + fitting, len(sizes))))
        begin += fitting
    return bounds
