"""``GlobalBatch``: the samples of every optimizer step over all ranks, and the micro-batches that process them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from .errors import ConfigurationError, is_count

_AUTO_FROM = re.compile(r"auto(?::([1-9][0-9]*))?")


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of every optimizer step over all ranks.

    Args:
        samples: their number.
        micro_batch_size: samples of a forward and backward pass on one rank; ``"auto"`` to find it, ``"auto:8"`` to
            begin with 8 then, None for the batch size of the loader.
    """

    samples: int
    micro_batch_size: int | str | None = None

    @property
    def is_found(self) -> bool:
        """Whether the size of the micro-batches is found during training."""
        return isinstance(self.micro_batch_size, str)

    @property
    def first(self) -> int | None:
        """The size to begin with, if it is found during training and this was given."""
        given = _AUTO_FROM.fullmatch(str(self.micro_batch_size))
        return int(given[1]) if given is not None and given[1] else None

    def share(self, ranks: int) -> int:
        """Return the samples of the rank that has the most."""
        return -(-self.samples // ranks)

    def check_ranks(self, ranks: int) -> None:
        """Refuse a number of ranks of which some would have no sample.

        Raises:
            ConfigurationError: there are more ranks than samples.
        """
        if self.samples < ranks:
            raise ConfigurationError(
                f"global_batch_size={self.samples} is less than the {ranks} ranks that share it: give at least {ranks}."
            )

    def __str__(self) -> str:
        return f"global_batch_size={self.samples}"


def pieces_of(samples: int, size: int) -> tuple[int, ...]:
    """Return the sizes of the micro-batches of at most ``size`` samples; only the last one may be smaller."""
    full, rest = divmod(samples, size)
    return (size,) * full + ((rest,) if rest else ())


def resolve_global_batch(samples: int | None, micro_batch_size: Any) -> GlobalBatch | None:
    """Return the global batch for two arguments of a Trainer; ``None`` without the first one.

    Raises:
        ConfigurationError: the second is not a size, is larger than the first, or is given without it.
    """
    is_word = isinstance(micro_batch_size, str) and _AUTO_FROM.fullmatch(micro_batch_size) is not None
    if micro_batch_size is not None and not is_word and not is_count(micro_batch_size, 1):
        raise ConfigurationError(
            f"micro_batch_size={micro_batch_size!r} must be 'auto', 'auto:8' to begin with 8 samples, a whole number "
            "of at least 1, or None for the batch size of the loader."
        )
    if samples is None:
        if micro_batch_size is not None:
            raise ConfigurationError(
                f"micro_batch_size={micro_batch_size!r} cuts global batches into pieces: give global_batch_size, too; "
                "without it, the batch size of the loader is the size of a micro-batch."
            )
        return None
    if isinstance(micro_batch_size, int) and micro_batch_size > samples:
        raise ConfigurationError(
            f"micro_batch_size={micro_batch_size} is more than global_batch_size={samples}: give at most {samples}."
        )
    return GlobalBatch(samples, micro_batch_size)
