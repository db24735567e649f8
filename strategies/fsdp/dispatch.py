"""Dispatch of tokens to the ranks that hold their experts, and of the results back.

Each token is sent once to each rank of a group that has at least one of its experts, with the numbers and weights of
its experts. The rank runs the layer's own forward pass with its own experts, one row for each token and expert, and
adds the results of a token. They come back to the rank of the token, which adds those of several ranks (Lepikhin et al.
2020, "GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding").

Numbers of tokens differ between ranks and passes, and none are dropped. All ranks of a group call the same collectives
in every forward and backward pass, also without a token to send or to compute. A filler's pass sends none, so that the
sums of other ranks are the same whatever it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Experts: from rows [rows, width], indices and weights of their experts [rows, 1], to outputs [rows, width]."""


class Sending:
    """Whether the passes in progress send this rank's tokens."""

    def __init__(self) -> None:
        self.enabled = True

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Send no tokens inside; their mixtures are zero. Those of other ranks are computed as always."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before


class Dispatch:
    """Computes mixtures of experts that are divided among the ranks of a group.

    Args:
        group: the ranks; the first one has the first experts.
        count: the number of experts of each rank.
        compute: this rank's experts, numbered from 0.
        sending: stops sending this rank's tokens.
    """

    def __init__(self, group: dist.ProcessGroup, count: int, compute: Compute, sending: Sending | None = None) -> None:
        self._group, self._count, self._compute = group, count, compute
        self._sending = sending or Sending()

    def __call__(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the mixture for this rank's tokens, [tokens, width]. Collective.

        Args:
            hidden: the tokens, [tokens, width].
            index: the numbers of their experts among all, [tokens, top_k].
            weights: the weights of these experts, [tokens, top_k].
        """
        ranks, share = self._group.size(), self._group.rank()
        owner = index.div(self._count, rounding_mode="floor")
        wanted = owner.unsqueeze(1).eq(torch.arange(ranks, device=index.device).unsqueeze(1)).any(2)
        if not self._sending.enabled:
            wanted = torch.zeros_like(wanted)
        rows = _Rows.by_column(wanted, min(ranks, index.shape[1]))
        routes = _Routes.agreed(wanted.sum(0), self._group)
        arrived, arrived_weights = _exchange(routes, float(ranks), rows.copied(hidden), rows.copied(weights))
        arrived_index = routes.send(index[rows.token])
        computed = self._computed(arrived, arrived_index - share * self._count, arrived_weights)
        # A mean over ranks follows, of which only one in `ranks` has a copy of an expert: the gradients of experts get
        # that factor here, and those of tokens lose it again.
        (back,) = _exchange(routes.reversed(), 1.0 / ranks, computed)
        return rows.added(back)

    def _computed(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the sums over this rank's experts for tokens of all ranks."""
        mine = index.ge(0) & index.lt(self._count)
        places = mine.flatten().nonzero().squeeze(1)
        rows = _Rows.by_row(mine, places)
        tokens, numbers = rows.copied(hidden), index.flatten()[places].unsqueeze(1)
        scales = _Copied.apply(weights.reshape(-1, 1), places, _inverse(places, weights.numel()))  # type: ignore[no-untyped-call]
        if len(places):
            return rows.added(self._compute(tokens, numbers, scales))
        # Every rank needs gradients of all its parameters, as reductions follow: here they are those of a row of zeros.
        tokens, scales = (torch.cat([each, each.new_zeros(1, each.shape[1])]) for each in (tokens, scales))
        return rows.added(self._compute(tokens, numbers.new_zeros(1, 1), scales)[:0])


@dataclass(frozen=True)
class _Rows:
    """Rows that are copies of tokens: the token of each row, and the rows of each token.

    Sums follow the order of ``rows``, so they are the same in every run.
    """

    token: Tensor
    """[rows]"""
    rows: Tensor
    """[tokens, most]; the number of rows stands for none."""

    @classmethod
    def by_row(cls, wanted: Tensor, places: Tensor) -> _Rows:
        """Return a row for each true entry of [tokens, columns], token by token; ``places`` are their flat numbers."""
        most = wanted.shape[1]
        numbers = wanted.flatten().cumsum(0).view_as(wanted) - 1
        return cls._numbered(wanted, places.div(most, rounding_mode="floor"), numbers, most)

    @classmethod
    def by_column(cls, wanted: Tensor, most: int) -> _Rows:
        """Return a row for each true entry of [tokens, columns], column by column, at most ``most`` of a token."""
        turned = wanted.t().contiguous()
        numbers = turned.flatten().cumsum(0).view_as(turned).t() - 1
        return cls._numbered(wanted, turned.nonzero()[:, 1], numbers, most)

    @classmethod
    def _numbered(cls, wanted: Tensor, token: Tensor, numbers: Tensor, most: int) -> _Rows:
        rows = torch.where(wanted, numbers, len(token))
        return cls(token, rows if rows.shape[1] == most else rows.sort(1).values[:, :most])

    def copied(self, tokens: Tensor) -> Tensor:
        """Return the rows, [rows, width], of values of the tokens."""
        rows: Tensor = _Copied.apply(tokens, self.token, self.rows)  # type: ignore[no-untyped-call]
        return rows

    def added(self, rows: Tensor) -> Tensor:
        """Return the sum of each token's rows, [tokens, width]."""
        tokens: Tensor = _Added.apply(rows, self.token, self.rows)  # type: ignore[no-untyped-call]
        return tokens


def _inverse(places: Tensor, count: int) -> Tensor:
    """Return for each of ``count`` numbers its position in ``places``, or the length of ``places``, as [count, 1]."""
    found = places.new_full((count, 1), len(places))
    found[places, 0] = torch.arange(len(places), device=places.device)
    return found


def _sum(rows: Tensor, table: Tensor) -> Tensor:
    padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    return padded[table].sum(1) if table.shape[1] > 1 else padded[table.squeeze(1)]


class _Copied(torch.autograd.Function):
    """Copies values of tokens to rows; backward adds, in a fixed order and not as atomic additions."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, token: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(table)
        return tokens[token]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _sum(gradient, *ctx.saved_tensors), None, None


class _Added(torch.autograd.Function):
    """Adds the rows of each token; backward copies."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return _sum(rows, table)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return gradient[token], None, None


@dataclass(frozen=True)
class _Routes:
    """The numbers of rows that this rank sends to, and receives from, each rank of a group."""

    sent: list[int]
    received: list[int]
    group: dist.ProcessGroup

    @classmethod
    def agreed(cls, counts: Tensor, group: dist.ProcessGroup) -> _Routes:
        """Return the routes for the numbers of rows to send. Collective."""
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        # Read at once, as the host waits for the device.
        sent, received = torch.stack([counts, theirs]).tolist()
        return cls(sent, received, group)

    def reversed(self) -> _Routes:
        """Return the routes of the way back."""
        return _Routes(self.received, self.sent, self.group)

    def send(self, rows: Tensor) -> Tensor:
        """Send rows, [rows, width], and return those that arrive. Collective."""
        arrived = rows.new_empty(sum(self.received), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), self.received, self.sent, group=self.group)
        return arrived


def _exchange(routes: _Routes, factor: float, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the rows that arrive, for each tensor; their gradients go back, multiplied by a factor. Collective."""
    arrived: tuple[Tensor, ...] = _Exchange.apply(routes, factor, *tensors)  # type: ignore[no-untyped-call]
    return arrived


class _Exchange(torch.autograd.Function):
    """Sends rows of several tensors. In one node, so that backward sends them in one order on all ranks."""

    @staticmethod
    def forward(ctx: Any, routes: _Routes, factor: float, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.routes, ctx.factor = routes.reversed(), factor
        ctx.carries_gradients_of_other_ranks = True
        return tuple(routes.send(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        needed = zip(gradients, ctx.needs_input_grad[2:], strict=True)
        back = [ctx.routes.send(gradient * ctx.factor) if needs else None for gradient, needs in needed]
        return None, None, *back
