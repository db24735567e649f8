"""``batch_items``: the count of a batch's items, which is the default weight of a logged value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def batch_items(batch: Any) -> int:
    """Return how many items a batch holds: the first dim of its first tensor, else the length of its first list of
    strings, else 1."""
    if (batch.__class__ is list or batch.__class__ is tuple) and batch and batch[0].__class__ is Tensor:
        first: Tensor = batch[0]
        return first.shape[0] if first.dim() else 1
    texts: list[int] = []
    found = next(_sizes(batch, texts), None)
    return found if found is not None else texts[0] if texts else 1


def _sizes(batch: Any, texts: list[int]) -> Iterator[int]:
    """Yield the first dim of each tensor or array; note the lengths of lists of strings in ``texts``."""
    if isinstance(batch, Tensor) or (hasattr(batch, "shape") and hasattr(batch, "dtype")):
        yield batch.shape[0] if len(batch.shape) else 1
    elif isinstance(batch, (str, bytes)):
        return
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _sizes(value, texts)
    elif isinstance(batch, Iterable) and not isinstance(batch, Iterator):
        items = list(batch)
        if items and isinstance(items[0], (str, bytes)):
            texts.append(len(items))
        for value in items:
            yield from _sizes(value, texts)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _sizes(getattr(batch, field.name), texts)
