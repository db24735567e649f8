"""The tokens of a sample, and the lengths of the samples of a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Number
from typing import Any

import torch
from torch import Tensor

from ..core.errors import ConfigurationError, DataError, closest_or_known
from .item_reader import check_dataset, has_indices

TOKENS = "input_ids"


def tokens_of(sample: Any) -> Any:
    """Return the tokens of a sample: ``input_ids`` of a mapping, the first of several fields, or the sample.

    A tuple has fields if one of its items is not a single number.

    Raises:
        DataError: the mapping has no such key.
    """
    if isinstance(sample, tuple) and not all(map(_is_single, sample)):
        return sample[0]
    if not isinstance(sample, Mapping):
        return sample
    if TOKENS not in sample:
        raise DataError(f"a sample has no {TOKENS!r}.{closest_or_known(TOKENS, [str(each) for each in sample])}")
    return sample[TOKENS]


def as_tokens(values: Any) -> Tensor:
    """Return token numbers as an int64 tensor of shape ``[tokens]``.

    Raises:
        DataError: they are not a sequence of integers.
    """
    try:
        tokens = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"a sample has a {type(values).__name__} as tokens, which is not a sequence of integers: give one, or a "
            f"dict with one as {TOKENS!r}."
        ) from None
    if tokens.ndim != 1 or (tokens.is_floating_point() and len(tokens)):
        raise DataError(
            f"a sample has tokens of shape {list(tokens.shape)} and {tokens.dtype}: give a sequence of integers, or a "
            f"dict with one as {TOKENS!r}."
        )
    return tokens.long()


def lengths_of(given: Any, owner: str) -> list[int]:
    """Return lengths in tokens: those given as integers, or those of the samples of a map-style dataset, read once.

    Args:
        given: integers, such as a list, a tensor or an array of shape ``[samples]``; or a map-style dataset.
        owner: the class in messages.

    Raises:
        ConfigurationError: it is neither, or empty, or a length is not an integer or is below 1.
        DataError: a sample has no sequence of tokens.
    """
    if not has_indices(given):
        raise ConfigurationError(
            f"{owner} got a {type(given).__name__}, whose samples have no indices: give the lengths of the samples, or "
            "a dataset with __getitem__ and __len__."
        )
    check_dataset(given, f"the dataset of {owner}")
    if isinstance(given, Tensor) or hasattr(given, "tolist"):
        given = given.tolist()
    samples = (given[place] for place in range(len(given)))
    measure = _given_length if _is_single(given[0]) else _length_of
    lengths = [measure(sample, place, owner) for place, sample in enumerate(samples)]
    if min(lengths) < 1:
        short = lengths.index(min(lengths))
        raise ConfigurationError(f"sample {short} of {owner} has {lengths[short]} tokens: give samples of at least 1.")
    return lengths


def _is_single(value: Any) -> bool:
    """Whether a value is a single number, such as a token, and not a sequence."""
    return isinstance(value, Number) or getattr(value, "ndim", None) == 0


def _given_length(length: Any, place: int, owner: str) -> int:
    if not isinstance(length, Integral):
        raise ConfigurationError(
            f"{owner} got {length!r} as the length of sample {place}: give lengths as integers, or a dataset."
        )
    return int(length)


def _length_of(sample: Any, place: int, owner: str) -> int:
    """Return the number of tokens of a sample: the items of a sequence of numbers."""
    tokens = tokens_of(sample)
    if hasattr(tokens, "ndim"):
        found = f"tokens of shape {[*tokens.shape]}"
        is_sequence = tokens.ndim == 1
    else:
        found = f"a {type(tokens).__name__} as tokens"
        is_sequence = has_indices(tokens) and not isinstance(tokens, str | Mapping)
        if is_sequence and len(tokens) and not _is_single(tokens[0]):
            found, is_sequence = f"{found} that begins with a {type(tokens[0]).__name__}", False
    if not is_sequence:
        raise DataError(
            f"sample {place} of {owner} has {found}, the length of which is not clear: give the lengths as a list of "
            f"integers, or samples that are sequences of numbers, alone, first in a tuple, or as {TOKENS!r} in a dict."
        )
    return len(tokens)
