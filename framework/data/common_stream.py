"""A check that all ranks read the same batches from an iterable, of which each rank takes its part.

A dataset that shards itself by rank gives other batches to each rank. Of these each rank would take a part again, so
most of the data would never be used, without any other sign of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.torch_internals import tree_leaves
from ..distributed.world import World


class _Source(Protocol):
    @property
    def name(self) -> str: ...
    def first_batches(self) -> list[str | None]: ...


class FirstBatch:
    """The fingerprint of the first batch that a rank has read from an iterable; None before, if it is not given."""

    def __init__(self, fingerprint: str | None = None) -> None:
        self.fingerprint = fingerprint

    def noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches; the first one is recorded when it is read."""
        # Not one generator for all batches, through which each of them would pass.
        return batches if self.fingerprint is not None else chain(self._note(batches), batches)

    def _note(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return an iterator over the first batch, which does not keep it."""
        for batch in batches:
            self.fingerprint = fingerprint_of(batch)
            yield batch
            del batch
            return


def fingerprint_of(batch: Any) -> str:
    """Return a hash of a batch's tensors, arrays, numbers and strings; of other values only their types count."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(batch):
        digest.update(_bytes_of(leaf))
    return digest.hexdigest()


def _bytes_of(leaf: Any) -> bytes:
    if isinstance(leaf, (str, bytes, int, float, complex, type(None))):
        return repr(leaf).encode()
    described = f"{type(leaf)} {getattr(leaf, 'dtype', '')} {getattr(leaf, 'shape', '')}".encode()
    # A kind of tensor or array whose bytes cannot be read, such as a sparse one, is compared by its shape.
    with suppress(Exception):
        if isinstance(leaf, Tensor):
            return described + leaf.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
        if getattr(leaf, "dtype", None) is not None and not leaf.dtype.hasobject:
            content: bytes = leaf.tobytes()
            return described + content
    return described


def compare_streams(world: World, source: _Source, note: Callable[[str], None]) -> None:
    """Report a source whose first batch is not the same on all ranks. Collective."""
    ranks = world.all_gather_object(source.first_batches())
    for marks in zip(*ranks, strict=False):
        if len(set(marks) - {None}) > 1:
            note(
                f"The ranks read different batches from {source.name}. They should all read the same ones, of which "
                f"each rank uses 1/{world.data_size}. If the dataset shards itself by rank, the rest of its data is "
                "lost: pass Trainer(use_distributed_sampler=False). If it shuffles, use the same seed on all ranks. "
                "Nothing is lost if only random augmentation differs."
            )
            return
