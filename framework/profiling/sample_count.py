"""``SampleCount``: counts the samples of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..metrics.log_arguments import batch_items


class SampleCount:
    """Counts the samples of batches as ``batch_items`` does.

    The place of the first tensor is looked for in the first batch. In batches of the same class it is tried first,
    which takes a fraction of the time.
    """

    def __init__(self) -> None:
        self._class: Any = None
        self._key: Any = None

    def __call__(self, batch: Any) -> int:
        """Return the number of samples of a batch."""
        if batch.__class__ is self._class:
            try:
                number: int = batch[self._key].shape[0]
            except (LookupError, AttributeError, TypeError):
                pass
            else:
                return number
        return self._look(batch)

    def _look(self, batch: Any) -> int:
        pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if _is_sequence(batch) else ()
        key, first = next(iter(pairs), (None, None))
        if isinstance(first, Tensor) and first.dim():
            self._class, self._key = type(batch), key
        return batch_items(batch)


def _is_sequence(batch: Any) -> bool:
    return type(batch) in (list, tuple)
