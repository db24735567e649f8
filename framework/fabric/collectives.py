"""``RankVerbs``: what a user's loop asks of the ranks: who am I, gather, reduce, wait, agree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.errors import ConfigurationError, unknown
from ..distributed.control import Triggers
from ..distributed.gather import gather_rows, map_leaves, pad_over_ranks, split_rows, stack_tensors
from ..distributed.rank_zero_first import first_in_turn
from ..distributed.world import World
from ..parallel.resources import Resources

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

_REDUCTIONS = ("sum", "mean", "none")


class RankVerbs:
    """The ranks as verbs. Methods marked "Collective" must be called by all ranks in the same order."""

    def __init__(self, resources: Resources) -> None:
        self.resources = resources
        self._world: World | None = None
        self._triggers: Triggers | None = None
        self._fired: set[str] = set()

    # ---- who this is ----------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """This process among the ranks; joined when it is first asked for. Collective the first time.

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

    def leave_world(self) -> None:
        """Join the ranks anew when they are next asked for, through the strategy there is then."""
        if self._world is not None:
            self._world.close()
        self._world = self._triggers = None

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self.world.device

    @property
    def world_size(self) -> int:
        """How many ranks there are, over all nodes."""
        return self.resources.world_size

    @property
    def global_rank(self) -> int:
        """This rank's number, from 0."""
        return self.resources.place.rank

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, from 0."""
        return self.resources.place.local_rank

    @property
    def node_rank(self) -> int:
        """The number of this rank's node, from 0."""
        return self.resources.place.node_rank

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    # Accelerate's names for the same.

    @property
    def num_processes(self) -> int:
        """How many ranks there are."""
        return self.world_size

    @property
    def process_index(self) -> int:
        """This rank's number, from 0."""
        return self.global_rank

    @property
    def local_process_index(self) -> int:
        """This rank's number on its node, from 0."""
        return self.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.is_global_zero

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first rank of its node."""
        return self.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.global_rank == self.world_size - 1

    # ---- data over ranks ------------------------------------------------------------------------------------------

    def to_device(self, obj: Any) -> Any:
        """Move a tensor, a module or a collection of tensors to this rank's device."""
        from lightning_utilities.core.apply_func import apply_to_collection

        if isinstance(obj, torch.nn.Module):
            return obj.to(self.device)
        return apply_to_collection(obj, Tensor, self._move)

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, non_blocking=True)

    def all_gather(self, data: Any, sync_grads: bool = False) -> Any:
        """Return tensors of all ranks, stacked in a new first dim; each has one shape on all ranks. Collective.

        Numbers are gathered as tensors. With ``sync_grads``, gradients flow back to the rank a part came from.
        """
        return stack_tensors(self.world, data, sync_grads, self.device)

    def gather(self, data: Any) -> Any:
        """Return tensors of all ranks, concatenated along the first dim in rank order. Collective.

        Ranks may have different numbers of rows. A 0-d tensor counts as one row. What is no tensor becomes a list with
        what each rank has, of which the items of lists are rows.
        """
        return gather_rows(self.world, data)

    def gather_object(self, data: Any) -> list[Any]:
        """Return the items of the lists of all ranks in one list; what is no list is one item. Collective."""
        found: list[Any] = gather_rows(self.world, data, as_objects=True)
        return found

    def all_reduce(self, data: Any, op: str = "mean", *, reduce_op: str | None = None) -> Any:
        """Return tensors reduced over all ranks: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``. Collective.

        Numbers are reduced as tensors; the given tensors do not change. ``reduce_op`` is Lightning's name for ``op``.
        """
        op = op if reduce_op is None else reduce_op

        def reduce(leaf: Any) -> Any:
            if isinstance(leaf, (bool, int, float)):
                leaf = torch.tensor(float(leaf) if op == "mean" else leaf, device=self.device)
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

        if self.world.size == 1:
            return obj
        sent = (
            apply_to_collection(obj, Tensor, lambda tensor: tensor.detach().cpu()) if self.global_rank == src else obj
        )
        received = self.world.broadcast_object(sent, src)
        moved: T = self.to_device(received)
        return moved

    def pad_across_processes(self, data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Return tensors padded with ``pad_index`` in ``dim`` to the largest size on any rank. Collective."""
        return pad_over_ranks(self.world, data, dim, pad_index, pad_first)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Generator[Any, None, None]:
        """Hand out this rank's part of a list, tuple, tensor, or dict of them: contiguous and as even as possible.

        With ``apply_padding`` the last item is repeated until all ranks have as many, so that results can be gathered
        with fixed shapes.
        """
        yield split_rows(inputs, self.global_rank, self.world_size, apply_padding)

    # ---- waiting for one another ----------------------------------------------------------------------------------

    def barrier(self, name: str | None = None) -> None:
        """Wait until all ranks are here; ``name`` is for whoever reads the code. Collective."""
        self.world.barrier()

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here. Collective."""
        self.world.barrier()

    def rank_zero_first(self, local: bool = False, timeout: float | None = None) -> AbstractContextManager[None]:
        """Let rank 0 (with ``local`` the first rank of each node) through the block before the others. Collective.

        A download or a cache belongs here: the first rank fills it, the others find it. They wait up to ``timeout``
        seconds, a day where that is None, whatever the limit on collectives. When the first rank raises, so do they:
        a ``RankError`` with what it said.

        Raises:
            RankError: a first rank failed or took too long: on entering the block, with ``local`` on leaving it too.
        """
        return first_in_turn(self.world, local, timeout)

    def main_process_first(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """Let rank 0 through the block before the others. Collective."""
        return self.rank_zero_first(timeout=timeout)

    def local_main_process_first(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """Let the first rank of each node through the block before all others. Collective."""
        return self.rank_zero_first(local=True, timeout=timeout)

    # ---- agreeing -------------------------------------------------------------------------------------------------

    def set_trigger(self, name: str = "stop") -> None:
        """Raise a trigger on this rank; all ranks see it at the next ``check_trigger`` of that name."""
        self._agreement().set(name)

    def check_trigger(self, name: str = "stop") -> bool:
        """Whether any rank has raised the trigger since it was last seen; alike on all; resets it. Collective."""
        self._fired.update(self._agreement().agree())
        seen = name in self._fired
        self._fired.discard(name)
        return seen

    def _agreement(self) -> Triggers:
        if self._triggers is None:
            self._triggers = Triggers(self.world)
        return self._triggers

    # ---- on some ranks only ---------------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self.is_global_zero:
            print(*args, **kwargs)

    def on_main_process(self, function: Function) -> Function:
        """Decorator: the function runs on rank 0 and returns None elsewhere."""
        return _only_when(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Decorator: the function runs on the first rank of each node and returns None elsewhere."""
        return _only_when(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorator: the function runs on the last rank and returns None elsewhere."""
        return _only_when(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int = 0) -> Any:
        """Decorator: the function runs on one rank and returns None elsewhere."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _only_when(lambda: self.process_index == process_index, function)


def _only_when(condition: Callable[[], bool], function: Function) -> Function:
    # Asked at the call: ranks may be started between the definition and the first call.
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if condition() else None

    return wrapped  # type: ignore[return-value]
