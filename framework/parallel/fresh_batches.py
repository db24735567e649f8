"""Copies of batches for steps that run more than once on a batch, and may modify its containers."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import Any


def fresh(batch: Any) -> Any:
    """Return a batch of new containers with the same tensors, since a step may remove items from a batch."""
    if batch.__class__ is dict:
        return {key: fresh(value) for key, value in batch.items()}
    if batch.__class__ is list:
        return [fresh(value) for value in batch]
    if batch.__class__ is tuple:
        return tuple(fresh(value) for value in batch)
    return copy(batch) if isinstance(batch, Mapping) else batch
