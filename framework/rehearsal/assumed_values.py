"""Values of integer tensors in a rehearsal, which has no data: those that are known, and choices that are assumed.

The shapes of a mixture of experts depend on the experts that a router has chosen. Without data, the choices of ``topk``
and ``argmax`` are assumed balanced. What is computed from them, and from whole numbers that are known, is computed in
fact: so the number of rows that are chosen, counted and sent is that of a balanced router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations
from math import comb, gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.torch_internals import FakeTensor, tree_flatten, tree_leaves, tree_map, tree_unflatten, without_modes

_ATEN = torch.ops.aten
# Operators whose results are the numbers of the largest entries along a dim: the position of the result among several,
# and that of the dim among the arguments.
_CHOICES: dict[Any, tuple[int, int]] = {
    _ATEN.topk.default: (1, 2),
    _ATEN.argmax.default: (0, 1),
    _ATEN.max.dim: (1, 1),
}
# Larger tensors have no values: masks of long sequences would take long to compute.
_MOST_ELEMENTS = 2**24
_MOST_SUBSETS = 4096


class AssumedValues:
    """The values of tensors without data, as far as they are known.

    Values belong to a storage, so that all its views have them.

    Args:
        number_of: returns the serial number of a tensor's storage.
    """

    def __init__(self, number_of: Callable[[FakeTensor], int]) -> None:
        self._number_of = number_of
        self._held: dict[int, Tensor] = {}

    def of(self, tensor: Tensor) -> Tensor | None:
        """Return the values of a tensor, in memory that its views share; None if they are not known."""
        if not isinstance(tensor, FakeTensor):
            return tensor if type(tensor) is Tensor and not tensor.is_meta else None
        held = self._held.get(self._number_of(tensor)) if self._held else None
        if held is None or held.dtype != tensor.dtype or held.nbytes != tensor.untyped_storage().nbytes():
            return tensor.constant
        with without_modes():
            return held.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def number(self, tensor: Tensor) -> Any:
        """Return the number that a tensor of one element holds, 1 if it is not known."""
        values = self.of(tensor)
        if values is None:
            return True if tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1
        with without_modes():
            return values.item()

    def give(self, tensor: Tensor, values: Tensor) -> None:
        """Set the values of a tensor, which has a storage of its own."""
        if isinstance(tensor, FakeTensor) and tensor.numel() <= _MOST_ELEMENTS and not tensor.is_sparse:
            with without_modes():
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                held = self._held[self._number_of(tensor)] = torch.zeros(size, dtype=tensor.dtype)
                held.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(values)

    def forget(self, number: int) -> None:
        """Drop the values of a storage."""
        self._held.pop(number, None)

    # ---- operators -------------------------------------------------------------------------------------------------

    def shaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator whose shape depends on values; None if they are not known."""
        if func is _ATEN.index.Tensor:
            return self._indexed(*args)
        if func is _ATEN.masked_select.default:
            mask = self.of(args[1].expand(torch.broadcast_shapes(args[0].shape, args[1].shape)))
            return None if mask is None else args[0].new_empty(_count(mask))
        found = self._computed(func, args, kwargs)
        if found is None:
            return None
        return tree_map(lambda each: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype), found)

    def _indexed(self, tensor: Tensor, indices: list[Tensor | None]) -> Any:
        """Return a tensor indexed by masks, as by the numbers of their entries."""
        numbers: list[Tensor | None] = []
        for each in indices:
            if each is None or each.dtype not in (torch.bool, torch.uint8):
                numbers.append(each)
                continue
            mask = self.of(each)
            if mask is None:
                return None
            # Of no use but for the shape of the result.
            numbers += each.new_zeros(_count(mask), mask.dim(), dtype=torch.long).unbind(1)
        return _ATEN.index.Tensor(tensor, numbers)

    def follow(self, func: Any, args: Any, kwargs: Any, returned: Any) -> None:
        """Compute the values of what an operator has returned or changed."""
        results = [each for each in tree_leaves(returned) if isinstance(each, FakeTensor)]
        numbers = {self._number_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)}
        if any(number in self._held for number in numbers):
            self._compute(func, args, kwargs, results, numbers)
        elif func in _CHOICES:
            self._choose(func, args, results)
        elif not func._schema.is_mutable and any(_is_whole(each) for each in results):
            self._compute(func, args, kwargs, results, numbers)

    def _compute(self, func: Any, args: Any, kwargs: Any, results: list[FakeTensor], numbers: set[int]) -> None:
        """Compute the values of results from those of arguments, whose storages have these numbers."""
        changes = func._schema.is_mutable
        is_small = all(each.numel() <= _MOST_ELEMENTS for each in results)
        # Views share the values of their storage.
        new = [self._number_of(each) not in numbers for each in results]
        found = self._computed(func, args, kwargs) if is_small and (changes or any(new)) else None
        if found is None:
            if changes:
                self._forget_changed(func, args, kwargs)
            return
        for each, values, is_new in zip(results, tree_leaves(found), new, strict=False):
            if is_new:
                self.give(each, values)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator on values; None if one is not known, or if it is random."""
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        leaves, structure = tree_flatten((args, kwargs))
        known = [self.of(each) if isinstance(each, Tensor) else each for each in leaves]
        if any(isinstance(each, Tensor) and values is None for each, values in zip(leaves, known, strict=True)):
            return None
        values, options = tree_unflatten(known, structure)
        with without_modes():
            return func(*values, **options)

    def _forget_changed(self, func: Any, args: Any, kwargs: Any) -> None:
        named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for each in tree_leaves(named.get(argument.name)):
                    if isinstance(each, FakeTensor):
                        self.forget(self._number_of(each))

    def _choose(self, func: Any, args: Any, results: list[FakeTensor]) -> None:
        position, place = _CHOICES[func]
        given = args[0]
        dim = args[place] if len(args) > place else -1 if func is _ATEN.topk.default else None
        if dim is None or not given.dim() or results[position].numel() > _MOST_ELEMENTS:
            return
        chosen = results[position]
        keeps = chosen.dim() == given.dim()
        rows = chosen.movedim(dim, -1) if keeps else chosen.unsqueeze(-1)
        with without_modes():
            values = balanced_choices(rows.shape[:-1].numel(), given.shape[dim], rows.shape[-1]).reshape(rows.shape)
            self.give(chosen, values.movedim(-1, dim) if keeps else values.squeeze(-1))

    # ---- collectives -----------------------------------------------------------------------------------------------

    def exchange(self, args: Any, group: dist.ProcessGroup) -> None:
        """Set the values that arrive in an all-to-all exchange, if all ranks send what this one does."""
        output, sent, _, received_sizes, sent_sizes, *_ = args
        values = self.of(sent)
        self.forget(self._number_of(output))
        if values is None:
            return
        ranks, rank = group.size(), group.rank()
        with without_modes():
            own = values.split(list(sent_sizes) or values.shape[0] // ranks)[rank]
            if output.shape[0] == ranks * own.shape[0] and len(set(received_sizes)) < 2:
                self.give(output, torch.cat([own] * ranks))

    def drop(self, tensors: Iterable[Any]) -> None:
        """Forget the values of tensors that other ranks change."""
        for each in tensors:
            if isinstance(each, FakeTensor):
                self.forget(self._number_of(each))


def _is_whole(tensor: Tensor) -> bool:
    return not tensor.dtype.is_floating_point and not tensor.dtype.is_complex


def _count(mask: Tensor) -> int:
    with without_modes():
        return int(mask.sum())


def balanced_choices(rows: int, total: int, count: int) -> Tensor:
    """Return choices of ``count`` different numbers below ``total`` for each row, [rows, count].

    In every ``total`` rows each number is chosen ``count`` times. Which numbers are chosen together varies from one
    ``total`` rows to the next: over all pairs in turn, or at random if there are too many subsets. So the part of the
    rows that chooses one of any group of numbers is that of random choices.
    """
    blocks = -(-rows // total)
    first = torch.arange(total).mul(_stride(total)).remainder(total).repeat(blocks)[:rows, None]
    if count == 1:
        return first
    subsets = comb(total - 1, count - 1)
    if subsets <= _MOST_SUBSETS:
        known = torch.tensor(list(combinations(range(1, total), count - 1)))
        others = known[torch.arange(blocks).mul(_stride(subsets)).remainder(subsets)]
    else:
        chances = torch.rand(blocks, total - 1, generator=torch.Generator().manual_seed(0))
        others = chances.topk(count - 1).indices + 1
    steps = torch.cat([torch.zeros(blocks, 1, dtype=torch.long), others], 1).repeat_interleave(total, 0)[:rows]
    return (first + steps).remainder(total)


def _stride(total: int) -> int:
    """Return a number without a common divisor, whose multiples are spread evenly."""
    near = max(1, round(total * 0.618))
    return next(each for each in range(near, near + total + 1) if gcd(each, total) == 1)
