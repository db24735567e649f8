"""``SequencePart``: the part of each sequence that a rank computes, under context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core.errors import DataError


class SequencePart:
    """Cuts tensors along a sequence dim: of ``size`` equal parts in order, the one at ``rank``.

    Attributes:
        rank: The place of the part, from 0.
        size: The number of parts; 1 without context parallelism, where nothing is cut.
        share: The part of the last batch's weight that is in this part of it.
        was_used: Whether anything was cut, or could have been.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.share = 1.0
        self.was_used = False
        self._limit: int | None = None

    @property
    def cuts(self) -> bool:
        """Whether tensors are cut at all."""
        return self.size > 1 or self._limit is not None

    def __call__(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return this part of a tensor, contiguous in memory; the tensor itself if that is all of it.

        Args:
            tensor: a tensor with a position of the sequence for each index of ``dim``.
            dim: its sequence dim; 1 is that of tensors [batch, sequence, ...].

        Raises:
            DataError: the number of positions is not divisible by the number of parts.
        """
        begin, length = self._span(tensor, dim)
        return tensor.narrow(dim, begin, length).contiguous() if length < tensor.shape[dim] else tensor

    def positions(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """Return the positions in the full sequence of this part of a tensor: int64 [positions], on its device.

        Args:
            tensor: the tensor before it is cut.
            dim: its sequence dim.
        """
        begin, length = self._span(tensor, dim)
        return torch.arange(begin, begin + length, device=tensor.device)

    def _span(self, tensor: Tensor, dim: int) -> tuple[int, int]:
        self.was_used = True
        full = tensor.shape[dim]
        if self._limit is not None:
            full = min(full, self._limit)
        if full % self.size:
            near = [str(each) for each in (full // self.size * self.size, (full // self.size + 1) * self.size) if each]
            raise DataError(
                f"a tensor of shape {list(tensor.shape)} has {full} positions, which cp={self.size} ranks cannot share "
                f"equally: cut or pad sequences to {' or '.join(near)} positions, with targets that the loss ignores, "
                f"or to any other multiple of {self.size}."
            )
        return self.rank * (full // self.size), full // self.size

    # ---- used by the loops ----------------------------------------------------------------------------------------

    def weigh_shares(self, cut: Callable[[SequencePart], Any], weight: Callable[[Any], Any]) -> None:
        """Set ``share`` for a batch.

        Args:
            cut: returns a part of the batch.
            weight: returns the weight of a part.
        """
        weights = [float(weight(cut(self._other(rank)))) for rank in range(self.size)]
        total = sum(weights)
        self.share = weights[self.rank] / total if total else 1.0 / self.size

    def _other(self, rank: int) -> SequencePart:
        other = SequencePart(rank, self.size)
        other._limit = self._limit
        return other

    @contextmanager
    def first(self, limit: int | None) -> Generator[None, None, None]:
        """Return a context in which sequences have at most ``limit`` positions, the first ones."""
        before, self._limit = self._limit, limit
        try:
            yield
        finally:
            self._limit = before

    @contextmanager
    def whole(self) -> Generator[None, None, None]:
        """Return a context in which every rank computes full sequences."""
        before, (self.rank, self.size, self.share) = (self.rank, self.size, self.share), (0, 1, 1.0)
        try:
            yield
        finally:
            self.rank, self.size, self.share = before
