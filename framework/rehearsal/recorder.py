"""``Recorder``: the bytes of tensors without data that are alive, by category, and the collectives of a step."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.degrees import Layout
from ..core.errors import ConfigurationError
from ..core.patches import patch
from ..core.torch_groups import group_called
from ..core.torch_internals import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    storage_key,
    tree_leaves,
    tree_map,
    unset_fake_temporarily,
)
from ..memory.communication import Traffic
from ..memory.formulas import Bytes
from .assumed_values import AssumedValues

# The operator by which `torch.tensor` returns.
_LIFT = torch.ops.aten.lift_fresh.default
_EXCHANGE = torch.ops.c10d.alltoall_base_.default
_GROUPED = torch.ops.aten._grouped_mm.default
_ITEM = torch.ops.aten._local_scalar_dense.default


class Phase(Enum):
    """The part of a rehearsal in which a tensor was allocated."""

    SETUP = "setup"
    PASSES = "passes"
    UPDATE = "update"


class Recorder(TorchDispatchMode):
    """Records what operations on tensors without data allocate and free, and their collectives.

    A storage counts once, with the size that it has: FSDP resizes those of gathered parameters. Categories are
    attributes of storages: what ``mark`` was given; ``buckets`` for what collectives send and receive, for parameters
    that were gathered, and for what was allocated outside of passes; else ``activations``.

    Operations on other tensors, such as the ranks of a mesh, run as always. A number that is read from a tensor without
    data is that of ``values``, and 1 if it is not known.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._phase = Phase.SETUP
        self.calls: list[Call] = []
        self._live: dict[int, tuple[int, weakref.ref[Any]]] = {}
        """The serial number of a storage by its address, which others get when it is freed."""
        self._sizes: dict[int, int] = {}
        self._changes: list[tuple[int, int]] = []
        """The serial number of a storage, and the bytes by which it has grown or shrunk; in order."""
        self._categories: dict[int, str] = {}
        self._parameters: dict[int, weakref.ref[Tensor]] = {}
        """Parameters that operations were given, by their ``id``; those that strategies gather are not the module's."""
        self._start = 0
        self.values = AssumedValues(lambda tensor: self._update(tensor.untyped_storage()))
        self._patches = ExitStack()

    def __enter__(self) -> Any:
        resize = torch.UntypedStorage.resize_

        def resized(storage: Any, size: Any) -> Any:
            returned = resize(storage, size)
            self._update(storage)
            return returned

        patch(self._patches, torch.UntypedStorage, "resize_", resized)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if func is _ITEM and isinstance(given[0], FakeTensor) and given[0].constant is None:
            return self.values.number(given[0])
        device = kwargs.get("device")
        if func is not _LIFT and _is_plain(given, device):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if device is not None and torch.device(device).type == "meta":
            with unset_fake_temporarily():
                return func(*tree_map(_on_meta, args), **kwargs)
        returned = self._run(func, args, kwargs)
        self._note(func, args, kwargs, given, returned)
        return returned

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _GROUPED and args[0].dtype != torch.bfloat16:
            # Without data torch accepts only this dtype.
            first, second = (each.to(torch.bfloat16) for each in args[:2])
            return func(first, second, *args[2:], **kwargs).to(args[0].dtype)
        try:
            return func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            returned = self.values.shaped(func, args, kwargs)
            if returned is None:
                raise
            return returned

    def _note(self, func: Any, args: Any, kwargs: Any, given: list[Tensor], returned: Any) -> None:
        # Not in set-up, where `Module.to` swaps tensors, which it refuses to where there is a reference.
        for each in given if self._phase is Phase.PASSES else ():
            if (
                isinstance(each, torch.nn.Parameter)
                and isinstance(each, FakeTensor)
                and id(each) not in self._parameters
            ):
                self._parameters[id(each)] = weakref.ref(each)
                self.mark("buckets", [each])
        for each in tree_leaves(returned):
            local = _local_of(each)
            if isinstance(local, FakeTensor):
                self._update(local.untyped_storage())
        call = call_of(func, args, returned)
        if call is None and func.namespace != "c10d":
            self.values.follow(func, args, kwargs, returned)
        elif func is _EXCHANGE:
            self.values.exchange(args, dist.ProcessGroup.unbox(args[2]))
        else:
            self.values.drop(given)
        if call is not None:
            self.calls.append(call)
            self.mark("buckets", [*given, *(each for each in tree_leaves(returned) if isinstance(each, Tensor))])
            for each in given:
                if isinstance(each, FakeTensor):
                    # What the other ranks have added is not known.
                    each.constant = None

    # ---- categories ------------------------------------------------------------------------------------------------

    def mark(self, category: str, tensors: Iterable[Any]) -> None:
        """Set the category of tensors, which ``buckets`` does not change where another one was set."""
        for each in tensors:
            local = _local_of(each)
            if isinstance(local, FakeTensor):
                number = self._update(local.untyped_storage())
                if category != "buckets" or self._categories[number] == "activations":
                    self._categories[number] = category

    def mark_gradients(self) -> None:
        """Set the category of the gradients of all parameters."""
        held = [parameter for each in self._parameters.values() if (parameter := each()) is not None]
        self.mark("gradients", [parameter.grad for parameter in held])

    def enter(self, phase: Phase) -> None:
        """Begin a part of the rehearsal."""
        self._phase = phase

    def begin_step(self) -> None:
        """Look for the peak from here on, and count collectives."""
        self._start = len(self._changes)
        self.calls.clear()

    # ---- bytes -----------------------------------------------------------------------------------------------------

    def peak(self) -> Bytes:
        """Return the bytes that are alive at the peak, by category."""
        held: Counter[str] = Counter()
        most, total = Counter[str](), 0
        for index, (number, change) in enumerate(self._changes):
            held[self._categories[number]] += change
            if index + 1 >= self._start and (now := sum(held.values())) > total:
                most, total = held.copy(), now
        return Bytes(**{category: most[category] for category in most if most[category] > 0})

    def _update(self, storage: Any) -> int:
        """Record the size of a storage; return its serial number."""
        address = storage_key(storage)
        known = self._live.get(address)
        if known is None or known[1]() is not storage:
            number = len(self._sizes)
            self._sizes[number] = 0
            self._categories[number] = "activations" if self._phase is Phase.PASSES else "buckets"
            self._live[address] = number, weakref.ref(storage, lambda _: self._freed(address, number))
        else:
            number = known[0]
        self._resize(number, storage.nbytes())
        return number

    def _freed(self, address: int, number: int) -> None:
        self._resize(number, 0)
        self.values.forget(number)
        if self._live.get(address, (None,))[0] == number:
            del self._live[address]

    def _resize(self, number: int, size: int) -> None:
        change = size - self._sizes[number]
        if change:
            self._sizes[number] = size
            self._changes.append((number, change))


def _local_of(value: Any) -> Any:
    """Return this rank's part of a sharded tensor, and anything else unchanged."""
    if not isinstance(value, DTensor):
        return value
    with torch.no_grad():
        return value.to_local()


def _is_plain(tensors: list[Tensor], device: Any) -> bool:
    """Whether an operation has no tensors of this rehearsal, nor returns one."""
    if not tensors or any(type(each) not in (Tensor, torch.nn.Parameter) for each in tensors):
        return False
    return device is None or torch.device(device).type == "meta" or not any(each.is_meta for each in tensors)


def _on_meta(given: Any) -> Any:
    """Return a tensor of torch's own on the meta device, as parts that a rank does not hold have."""
    if not isinstance(given, FakeTensor):
        return given
    return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="meta")


# ---- collectives ----------------------------------------------------------------------------------------------------


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
            return group_called(each)  # type: ignore[arg-type]
        if isinstance(each, torch.ScriptObject):
            # Another object, such as the operation of a reduction, is refused.
            with suppress(RuntimeError):
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
