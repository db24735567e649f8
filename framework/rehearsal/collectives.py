"""The collectives of a rehearsed step: operation, ranks and bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core.degrees import Layout
from ..core.errors import ConfigurationError
from ..memory.communication import Traffic

# By the name of torch's operator: the collective, and the argument that holds the full tensors; None: the result.
_OPERATORS: dict[str, tuple[str, int | None]] = {
    "c10d::allreduce_": ("all-reduce", 0),
    "c10d::allreduce_coalesced_": ("all-reduce", 0),
    "c10d::_allgather_base_": ("all-gather", 0),
    "c10d::allgather_": ("all-gather", 0),
    "c10d::allgather_coalesced_": ("all-gather", 0),
    "c10d::allgather_into_tensor_coalesced_": ("all-gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_": ("reduce-scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "c10d::alltoall_base_": ("all-to-all", 1),
    "c10d::alltoall_": ("all-to-all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
    "_c10d_functional::all_reduce": ("all-reduce", 0),
    "_c10d_functional::all_reduce_": ("all-reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all-gather", None),
    "_c10d_functional::reduce_scatter_tensor": ("reduce-scatter", 0),
    "_c10d_functional::all_to_all_single": ("all-to-all", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_dtensor::shard_dim_alltoall": ("all-to-all", 0),
}


@dataclass(frozen=True)
class Call:
    """One collective."""

    operation: str
    group: dist.ProcessGroup
    payload: int


def call_of(operator: Any, args: Sequence[Any], result: Any) -> Call | None:
    """Return the collective that an operator of torch has run; None if it is not one."""
    known = _OPERATORS.get(operator._schema.name)
    if known is None:
        return None
    operation, position = known
    held = tree_leaves(result if position is None else args[position])
    payload = sum(each.numel() * each.element_size() for each in held if isinstance(each, Tensor))
    return Call(operation, _group_of(args), payload)


def _group_of(args: Sequence[Any]) -> dist.ProcessGroup:
    for each in reversed(args):
        if isinstance(each, str):
            return torch._C._distributed_c10d._resolve_process_group(each)  # type: ignore[arg-type]
        if isinstance(each, torch.ScriptObject) and "ProcessGroup" in str(each._type()):
            return dist.ProcessGroup.unbox(each)
    raise TypeError("the operator has no process group")


def summed(calls: Iterable[Call], layout: Layout) -> tuple[Traffic, ...]:
    """Return calls of the same operation and axes as one, the largest first."""
    found: dict[tuple[str, str, int], tuple[int, int]] = {}
    names: dict[str, str] = {}
    for call in calls:
        group = call.group.group_name
        if group not in names:
            try:
                ranks = dist.get_process_group_ranks(call.group)
            except KeyError:
                raise ConfigurationError("The step uses a process group that was made before the rehearsal.") from None
            names[group] = axes_of(ranks, layout)
        axes = names[group]
        if call.operation == "all-to-all" and layout.ep > 1:
            axes = _axes_of_exchange(call.group, axes, layout)
        key = call.operation, axes, call.group.size()
        times, payload = found.get(key, (0, 0))
        found[key] = times + 1, payload + call.payload
    rows = [Traffic(*key, times, payload) for key, (times, payload) in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.sent))


def axes_of(ranks: Sequence[int], layout: Layout) -> str:
    """Return the axes along which ranks differ, those of most distant ranks first."""
    order = ("tp", "cp", "pp", "dp_shard", "dp_replicate")
    sizes = {each.name: getattr(layout, each.name) for each in fields(layout)}
    found, distance = [], 1
    for axis in order:
        if len({rank // distance % sizes[axis] for rank in ranks}) > 1:
            found.append(axis)
        distance *= sizes[axis]
    return " x ".join(reversed(found)) or "1 rank"


def _axes_of_exchange(group: dist.ProcessGroup, axes: str, layout: Layout) -> str:
    """Return the axes of an all-to-all exchange: ranks with different experts are among those of other axes."""
    ranks = sorted(dist.get_process_group_ranks(group))
    # Beside one another, but for the ranks that share layers.
    has_all_experts = ranks == [ranks[0] + layout.tp * place for place in range(layout.ep)]
    if not has_all_experts or group.group_desc == "mesh_context":
        return axes
    # A group of all ranks serves each axis that has all of them.
    return "cp, ep" if axes == "cp" and group.group_desc != "mesh_expert" else "ep"
