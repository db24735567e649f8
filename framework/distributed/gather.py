"""Gathering, padding, splitting and slicing of collections of tensors and objects over ranks.

A *leaf* is a tensor, or any object other than a collection that contains a tensor. The rows of a tensor are its first
dim (a 0-d tensor is one row); the rows of a list or tuple are its items; any other object is one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.errors import ConfigurationError, DesyncError
from .data_parallel import part_of
from .user_collectives import all_parts
from .world import World

_RANKS_SHOWN = 8


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Return a collection of the same form with ``function`` applied to its leaves."""
    if isinstance(data, Tensor) or not _holds_tensor(data):
        return function(data)
    if isinstance(data, Mapping):
        items = {key: map_leaves(function, value) for key, value in data.items()}
        return type(data)(items) if type(data) is not dict else items  # type: ignore[call-arg]
    parts = [map_leaves(function, item) for item in data]
    if hasattr(data, "_fields"):
        return type(data)(*parts)
    return parts if type(data) is list else type(data)(parts)


def _holds_tensor(data: Any) -> bool:
    if isinstance(data, Tensor):
        return True
    if isinstance(data, Mapping):
        # A dict is always traversed: its values are named separately.
        return bool(data)
    return isinstance(data, (list, tuple)) and any(_holds_tensor(item) for item in data)


def leaves_of(data: Any) -> list[Any]:
    """Return the leaves of a collection in order."""
    found: list[Any] = []
    map_leaves(found.append, data)
    return found


def gather_rows(world: World, data: Any, valid: bool = True, as_objects: bool = False) -> Any:
    """Concatenate the rows of all ranks, in rank order, in every leaf of a collection. Collective.

    Ranks may have different numbers of rows; the rows of a rank that is not ``valid`` are dropped. With ``as_objects``,
    ``data`` is a list of rows of any type.

    Raises:
        ConfigurationError: tensors differ in more than their number of rows. Raised on all ranks.
    """
    if as_objects:
        parts = world.all_gather_object(_rows_of(data) if valid else [])
        return [row for rows in parts for row in rows]
    leaves = [leaf.unsqueeze(0) if isinstance(leaf, Tensor) and leaf.dim() == 0 else leaf for leaf in leaves_of(data)]
    described = [_described(leaf, valid) for leaf in leaves]
    everyone = world.all_gather_object(described)
    if any(len(other) != len(described) for other in everyone):
        counts = ", ".join(f"rank {rank}: {len(other)}" for rank, other in enumerate(everyone[:_RANKS_SHOWN]))
        raise DesyncError(f"ranks gather collections of different forms (leaves of each: {counts}).")
    results = iter([_gather_leaf(world, leaf, list(parts)) for leaf, *parts in zip(leaves, *everyone, strict=True)])
    return map_leaves(lambda leaf: next(results), data)


def join_rows(collections: list[Any]) -> Any:
    """Return a collection with the rows of all collections in every leaf."""
    leaves = iter(zip(*[leaves_of(each) for each in collections], strict=True))

    def join(leaf: Any) -> Any:
        parts = next(leaves)
        if isinstance(leaf, Tensor):
            return torch.cat([part.unsqueeze(0) if part.dim() == 0 else part for part in parts])
        return [row for part in parts for row in _rows_of(part)]

    return map_leaves(join, collections[0])


def _described(leaf: Any, valid: bool) -> Any:
    """Return the dtype and shape of a tensor; of any other leaf its rows, which travel with this description."""
    if isinstance(leaf, Tensor):
        return str(leaf.dtype), tuple(leaf.shape) if valid else (0, *leaf.shape[1:])
    return _rows_of(leaf) if valid else []


def _gather_leaf(world: World, leaf: Any, described: list[Any]) -> Any:
    """Return the rows of one leaf on all ranks, which ``described`` holds already where the leaf is not a tensor."""
    if isinstance(leaf, Tensor):
        return _gather_tensor(world, leaf, described)
    return [row for rows in described for row in rows]


def _rows_of(data: Any) -> list[Any]:
    return list(data) if isinstance(data, (list, tuple)) else [data]


def _gather_tensor(world: World, tensor: Tensor, described: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
    rows = [shape[0] for _, shape in described]
    kinds = {(dtype, shape[1:]) for dtype, shape in described if shape[0]}
    if len(kinds) > 1:
        shown = "; ".join(
            f"rank {rank}: {list(shape)} {dtype.removeprefix('torch.')}"
            for rank, (dtype, shape) in enumerate(described[:_RANKS_SHOWN])
        )
        raise ConfigurationError(
            f"tensors to be gathered differ in more than their rows ({shown}): give them one dtype, and pad the other "
            "dims first with pad_across_processes."
        )
    if not kinds:
        return tensor[:0]
    if world.size == 1:
        return tensor
    ((_, trailing),) = kinds
    most, own = max(rows), rows[world.rank]
    if own != most:
        # A rank without valid rows may have different trailing dims: it sends only padding.
        padded = tensor.new_zeros((most, *trailing))
        if own:
            padded[:own] = tensor[:own]
        tensor = padded
    gathered = world.all_gather(tensor)
    if all(count == most for count in rows):
        return gathered.flatten(0, 1)
    return torch.cat([part[:count] for part, count in zip(gathered, rows, strict=True)])


def stack_tensors(world: World, data: Any, with_gradient: bool, device: torch.device) -> Any:
    """Stack the tensors of the ranks in a new first dim, in every leaf of a collection. Collective.

    Of ranks whose tensors differ in their first dim, the rows form one part, so the new dim has size 1.

    Raises:
        ConfigurationError: tensors differ in another dim.
    """
    leaves = [
        torch.tensor(leaf, device=device) if isinstance(leaf, (bool, int, float)) else leaf for leaf in leaves_of(data)
    ]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if world.size == 1:
        parts = [[tensor if with_gradient else tensor.detach()] for tensor in tensors]
    else:
        parts = all_parts(world, tensors, with_gradient)
    results = iter([_stacked(part) for part in parts])
    stacked = iter([next(results) if isinstance(leaf, Tensor) else leaf for leaf in leaves])
    return map_leaves(lambda leaf: next(stacked), data)


def _stacked(parts: list[Tensor]) -> Tensor:
    if all(part.shape == parts[0].shape for part in parts):
        return torch.stack(parts)
    if len({part.shape[1:] for part in parts}) > 1 or any(part.dim() == 0 for part in parts):
        raise ConfigurationError(
            "all_gather was given tensors that differ in more than their first dim on the ranks: "
            f"{', '.join(str(list(part.shape)) for part in parts[:_RANKS_SHOWN])}. Pad the other dims first, with "
            "fabric.pad_across_processes(tensor, dim)."
        )
    return torch.cat(parts).unsqueeze(0)


def pad_over_ranks(world: World, data: Any, dim: int, pad_index: float, pad_first: bool) -> Any:
    """Pad the tensors of a collection in ``dim`` to the largest size on any rank. Collective.

    Tensors without that dim are unchanged.
    """
    sizes = [leaf.shape[dim] if _has_dim(leaf, dim) else -1 for leaf in leaves_of(data)]
    largest = iter([max(column) for column in zip(*world.all_gather_object(sizes), strict=True)])

    def fill(leaf: Any) -> Any:
        size = next(largest)
        if not _has_dim(leaf, dim) or leaf.shape[dim] == size:
            return leaf
        missing = size - leaf.shape[dim]
        behind = leaf.dim() - 1 - (dim % leaf.dim())
        return pad(leaf, [0, 0] * behind + ([missing, 0] if pad_first else [0, missing]), value=pad_index)

    return map_leaves(fill, data)


def _has_dim(leaf: Any, dim: int) -> bool:
    return isinstance(leaf, Tensor) and -leaf.dim() <= dim < leaf.dim()


def split_rows(data: Any, rank: int, size: int, padded: bool) -> Any:
    """Return one rank's part of a list, tuple or tensor, or of each value of a dict; parts are as even as possible.

    With ``padded`` all parts have as many rows as the largest, by repeating the last row.

    Raises:
        ConfigurationError: the values of a dict have different lengths.
    """
    if isinstance(data, Mapping):
        lengths = {key: len(value) for key, value in data.items()}
        if len(set(lengths.values())) > 1:
            raise ConfigurationError(f"the values of a dict are split together, but their lengths differ: {lengths}.")
        return type(data)({key: split_rows(value, rank, size, padded) for key, value in data.items()})  # type: ignore[call-arg]
    begin, end = part_of(len(data), rank, size)
    part = data[begin:end]
    missing = -(-len(data) // size) - (end - begin) if padded else 0
    if missing <= 0 or not len(data):
        return part
    last = data[-1:] if begin == end else data[end - 1 : end]
    if isinstance(data, Tensor):
        return torch.cat([part, *[last] * missing])
    return part + last * missing


def slice_rows(data: Any, begin: int, end: int) -> Any:
    """Return rows ``begin`` to ``end`` of every leaf that has rows."""
    rows = rows_in(data)

    def cut(leaf: Any) -> Any:
        sliceable = isinstance(leaf, (list, tuple)) or (isinstance(leaf, Tensor) and leaf.dim() > 0)
        return leaf[begin:end] if sliceable and len(leaf) == rows else leaf

    return map_leaves(cut, data)


def rows_in(data: Any) -> int:
    """Return how many rows a batch has, by its first tensor, or else its first list."""
    leaves = leaves_of(data)
    tensor = next((leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0), None)
    if tensor is not None:
        return len(tensor)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, (list, tuple))), 1)
