"""``Collectives``: the part of a Fabric that exchanges data between ranks, waits for them and agrees with them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.absent_names import must_be_none
from ..core.errors import ConfigurationError, DataError, unknown
from ..distributed.control import Triggers
from ..distributed.gather import (
    gather_rows,
    join_rows,
    leaves_of,
    map_leaves,
    pad_over_ranks,
    split_rows,
    stack_tensors,
)
from ..distributed.rank_zero_first import first_in_turn
from ..distributed.user_collectives import reduce_tensors, values_of_present
from ..distributed.world import World
from ..parallel.resources import Resources
from ..parallel.sequence_part import SequencePart

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

_ALL_RANKS = "all ranks take part; for some of them call torch.distributed with your own group"
_REDUCTIONS = ("sum", "mean", "none")


def to_device(obj: Any, device: torch.device) -> Any:
    """Move a tensor, a module or a collection of tensors to a device. Copies from pinned memory do not block."""
    from lightning_utilities.core.apply_func import apply_to_collection

    if isinstance(obj, torch.nn.Module):
        return obj.to(device)
    return apply_to_collection(obj, Tensor, lambda tensor: tensor.to(device, non_blocking=True))


class Collectives:
    """Communication between ranks. Every rank must call methods marked "Collective", in the same order."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self._world: World | None = None
        self._triggers: Triggers | None = None
        self._fired: set[str] = set()

    @property
    def world(self) -> World:
        """The process group. Joined on first access, which is collective.

        Raises:
            ConfigurationError: the ranks have not been started.
        """
        if self._world is None:
            if self.resources.must_launch:
                raise ConfigurationError(
                    f"devices={self.resources.devices} asks for {self.resources.world_size} ranks, and they have not "
                    "been started: call fabric.launch() first, at the top of the script, or fabric.launch(function) "
                    "in a notebook."
                )
            self._world = self.resources.connect()
        return self._world

    @property
    def part(self) -> SequencePart:
        """Cuts tensors to the part of each sequence that this rank computes: ``fabric.part(tokens)``.

        For ``parallel={"cp": ...}``, where ranks share the sequences of a batch; without, a part is all of it. Cut all
        tensors that have a sequence dim, and give ``backward`` the number of targets in the part.
        """
        _ = self.world
        return self.resources.strategy.part

    def close(self) -> None:
        """Leave the process group, if it was joined."""
        if self._world is not None:
            self._world.close()

    # ---- data over ranks ------------------------------------------------------------------------------------------

    def to_device(self, obj: Any) -> Any:
        """Move a tensor, a module or a collection of tensors to this rank's device."""
        return to_device(obj, self.world.device)

    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked in a new first dim. Collective.

        Args:
            data: a tensor or number, or a collection of them. Where tensors differ in their first dim, the new dim has
                size 1, and the next one holds the rows of all ranks.
            group: must be None; Lightning has the argument.
            sync_grads: let gradients flow back to the rank that each part came from.
        """
        must_be_none("all_gather(group=...)", group, _ALL_RANKS)
        return stack_tensors(self.world, data, sync_grads, self.world.device)

    def gather(self, data: Any) -> Any:
        """Return the tensors of all ranks, concatenated along the first dim in rank order. Collective.

        Ranks may have different numbers of rows, and a 0-d tensor counts as one row. Other values are returned as a
        list with one item for each rank; the items of lists count as rows.
        """
        if (present := values_of_present(self.world, "gather", data)) is not None:
            return join_rows(list(present.values()))
        return gather_rows(self.world, data)

    def gather_object(self, data: Any) -> list[Any]:
        """Return the items of all ranks' lists in one list; a value that is not a list is one item. Collective."""
        if (present := values_of_present(self.world, "gather_object", data)) is not None:
            return [item for each in present.values() for item in (each if isinstance(each, (list, tuple)) else [each])]
        found: list[Any] = gather_rows(self.world, data, as_objects=True)
        return found

    def all_reduce(self, data: Any, op: str = "mean", *, reduce_op: str | None = None, group: None = None) -> Any:
        """Return tensors reduced over all ranks; numbers are reduced as tensors. Collective.

        Args:
            data: a tensor or number, or a collection of them. It is not modified.
            op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
            reduce_op: Lightning's name for ``op``.
            group: must be None; Lightning has the argument.
        """
        must_be_none("all_reduce(group=...)", group, _ALL_RANKS)
        op = op if reduce_op is None else reduce_op
        present = values_of_present(self.world, "all_reduce", data)
        others = None if present is None else [iter(leaves_of(each)) for each in present.values()]

        def as_tensor(leaf: Any) -> Any:
            if isinstance(leaf, (bool, int, float)):
                return torch.tensor(float(leaf) if op == "mean" else leaf, device=self.world.device)
            return leaf

        def reduce(leaf: Any) -> Any:
            leaf = as_tensor(leaf)
            if others is not None:
                leaves = [as_tensor(next(each)) for each in others]
                return reduce_tensors(leaves, op) if isinstance(leaf, Tensor) else leaf
            if not isinstance(leaf, Tensor):
                return leaf
            return self.world.all_reduce(leaf.detach().clone(), op)  # type: ignore[arg-type]

        return map_leaves(reduce, data)

    def reduce(self, data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return tensors reduced by ``"sum"`` or ``"mean"`` (or ``"none"``) over ranks, times ``scale``. Collective."""
        if reduction not in _REDUCTIONS:
            raise unknown("reduction", reduction, _REDUCTIONS)
        reduced = data if reduction == "none" else self.all_reduce(data, reduction)
        return map_leaves(lambda leaf: leaf * scale if isinstance(leaf, Tensor) else leaf, reduced)

    def broadcast(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src``, its tensors on this rank's device. Collective."""
        from lightning_utilities.core.apply_func import apply_to_collection

        world = self.world
        if world.size == 1:
            return obj
        if (present := values_of_present(world, "broadcast", obj if world.rank == src else None)) is not None:
            if src not in present:
                raise DataError(
                    f"broadcast(..., src={src}) in a step for which rank {src} has no batch: broadcast before."
                )
            return present[src]  # type: ignore[no-any-return]
        sent = apply_to_collection(obj, Tensor, lambda tensor: tensor.detach().cpu()) if world.rank == src else obj
        moved: T = self.to_device(world.broadcast_object(sent, src))
        return moved

    def pad_across_processes(self, data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Return tensors padded with ``pad_index`` in ``dim`` to the largest size on any rank. Collective."""
        return pad_over_ranks(self.world, data, dim, pad_index, pad_first)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Generator[Any, None, None]:
        """Yield this rank's part of a list, tuple, tensor, or dict of them: contiguous and as even as possible.

        With ``apply_padding`` the last item is repeated until all ranks have the same number, so that results can be
        gathered with fixed shapes.
        """
        yield split_rows(inputs, self.resources.place.rank, self.resources.world_size, apply_padding)

    # ---- synchronization ------------------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks have called this. Collective. ``name`` only documents the call."""
        if values_of_present(self.world, "barrier", None) is None:
            self.world.barrier()

    def rank_zero_first(self, local: bool = False, timeout: float | None = None) -> AbstractContextManager[None]:
        """Run a block on rank 0 (with ``local`` on the first rank of each node) before the other ranks. Collective.

        Use it for downloads and caches: the first rank fills them, the others find them.

        Args:
            local: let the first rank of each node go first.
            timeout: how many seconds the others wait; None is one day. The limit on collectives does not apply.

        Raises:
            RankError: a first rank failed or took too long. Raised on entering the block, with ``local`` also on
                leaving it. The message holds the first rank's error.
        """
        return first_in_turn(self.world, local, timeout)

    def main_process_first(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """Accelerate's name for ``rank_zero_first(timeout=timeout)``. Collective."""
        return self.rank_zero_first(timeout=timeout)

    def local_main_process_first(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """Accelerate's name for ``rank_zero_first(local=True, timeout=timeout)``. Collective."""
        return self.rank_zero_first(local=True, timeout=timeout)

    # ---- agreement ------------------------------------------------------------------------------------------------

    def set_trigger(self, name: str = "stop") -> None:
        """Raise a trigger on this rank; the next ``check_trigger`` of that name returns True on all ranks."""
        self._control().set(name)

    def check_trigger(self, name: str = "stop") -> bool:
        """Return whether any rank raised the trigger since the last check, and reset it. Collective.

        The result is the same on all ranks.
        """
        self._fired.update(self._control().agree())
        seen = name in self._fired
        self._fired.discard(name)
        return seen

    def _control(self) -> Triggers:
        if self._triggers is None:
            self._triggers = Triggers(self.world)
        return self._triggers

    # ---- on some ranks only ---------------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self.resources.place.rank == 0:
            print(*args, **kwargs)

    def on_process(self, function: Function | None = None, process_index: int = 0) -> Any:
        """Decorator: run the function on one rank and return None on the others."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only_when(lambda: self.resources.place.rank == process_index, function)

    def on_main_process(self, function: Function) -> Function:
        """Decorator: run the function on rank 0 and return None on the others."""
        return _only_when(lambda: self.resources.place.rank == 0, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Decorator: run the function on the first rank of each node and return None on the others."""
        return _only_when(lambda: self.resources.place.local_rank == 0, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorator: run the function on the last rank and return None on the others."""
        return _only_when(lambda: self.resources.place.rank == self.resources.world_size - 1, function)


def _only_when(condition: Callable[[], bool], function: Function) -> Function:
    # Evaluated in each call: ranks may be started between the definition and the first call.
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return wrapped  # type: ignore[return-value]
