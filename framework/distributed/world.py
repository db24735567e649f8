"""``World``: the rank of this process, and the collectives between ranks.

A single process uses the same class with size 1: its collectives are identities, so no caller needs a special case.
Nor does a single process that rehearses the part of one rank among many (``framework/rehearsal``).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator, Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.degrees import Layout
from ..core.errors import ConfigurationError, LoopError, unknown
from ..system.environment import environment_placement, own_records, variables_set
from ..system.launcher_env import Placement
from .backends import group_backend
from .devices import share_cores, take_device
from .groups_aside import is_rehearsed, refuse_aside
from .node_board import share_board
from .object_frames import FrameSize, all_gather_object, broadcast_object, gather_object
from .rank_zero import set_rank_zero_functions
from .rendezvous import destroy_group, is_initialized, meet
from .shared_memory_reduce import CAPACITY, Board

T = TypeVar("T")
ReduceName = Literal["sum", "mean", "min", "max"]


class Pending(Protocol):
    """A sum over the ranks in progress."""

    def wait(self) -> Sequence[float]:
        """Return the sums. Collective."""
        ...

    def is_completed(self) -> bool: ...


class _Known:
    """The sums of a single process."""

    def __init__(self, sums: Sequence[float]) -> None:
        self._sums = sums

    def wait(self) -> Sequence[float]:
        return self._sums

    def is_completed(self) -> bool:
        return True


class _OverGloo:
    """Sums that gloo computes."""

    def __init__(self, vector: Tensor, group: dist.ProcessGroup) -> None:
        self._vector = vector
        # Called on the group directly: torch.distributed.all_reduce costs several times as much in Python.
        self._work = group.allreduce([vector])

    def wait(self) -> Sequence[float]:
        self._work.wait()
        sums: list[float] = self._vector.tolist()
        return sums

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def placement(num_nodes: int = 1) -> Placement:
    """Return the rank placement of this process, without side effects.

    It is read from an existing torch.distributed group, else from the variables of torchrun or phalanx, of SLURM, or of
    Open MPI. ``num_nodes`` is only used if none of these gives the number of ranks per node.

    Raises:
        ConfigurationError: the variables contradict one another, or one that is needed is missing.
    """
    if not is_initialized():
        return environment_placement(num_nodes)
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        read = environment_placement(num_nodes)
    except ConfigurationError:
        read = Placement()
    if (read.rank, read.size) == (rank, size):
        return read
    local_size = max(1, size // num_nodes)
    return Placement(rank, size, rank % local_size, local_size, rank // local_size, num_nodes)


class Attendance:
    """Whether this rank has values for the collectives that the user's code calls; ``user_collectives`` reads it."""

    def __init__(self) -> None:
        self.varies = False
        """Whether steps of a Trainer run: ranks may have different numbers of batches."""
        self.counts = True
        """Whether the values of this rank count. They do not while it runs a filler batch."""
        self.was_called = False
        """Whether the user's code has called a collective since this was last reset."""
        self._refusal = ""

    @contextlib.contextmanager
    def refusing(self, reason: str) -> Generator[None, None, None]:
        """Refuse collectives of the user's code within the context; ``reason`` follows the name of the collective."""
        self._refusal = reason
        try:
            yield
        finally:
            self._refusal = ""

    def check(self, name: str) -> None:
        """Raise for a collective that is refused now.

        Raises:
            LoopError: the ranks cannot call it together here.
        """
        if self._refusal:
            raise LoopError(f"{name} {self._refusal}")


class World:
    """The rank of this process, its device, and the collectives between ranks.

    Several worlds in one process share torch's default group, which none of them destroys. Each builds a separate CPU
    group for control messages at its first collective that needs one.
    """

    def __init__(self, place: Placement, device: torch.device) -> None:
        self.rank, self.size = place.rank, place.size
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.node_rank = place.node_rank
        self.num_nodes = place.num_nodes
        self.placement = place
        self.device = device
        self.is_global_zero = place.rank == 0
        # The shard of the data that this rank reads, and the number of shards. Set by strategies in which several ranks
        # read the same shard.
        self.data_rank = place.rank
        self.data_size = place.size
        # Ranks that compute the same, and draw the same random numbers, are a group: the number of ranks in each, the
        # number of this rank's group, and whether the results of this rank count, as those of a group's first rank do.
        self.identical = 1
        self.identical_group = place.rank
        self.counts_data = True
        self.attendance = Attendance()
        # Whether there is no other process: objects and small numbers of other ranks are taken to be those of this one.
        # True of a single rank, and of one among ranks that are rehearsed, whose group is torch's "fake" one.
        self.is_alone = place.size == 1 or is_rehearsed()
        self._control: list[dist.ProcessGroup] = []
        self._board: list[Board] = []
        # If ``close`` is never called: when the world is garbage-collected, or at process exit.
        weakref.finalize(self, destroy_group, self._control)
        weakref.finalize(self, _close_board, self._board)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, device={str(self.device)!r})"

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> World:
        """Return the world of a single process on ``device``, ignoring the environment."""
        return cls(Placement(), torch.device(device))

    @classmethod
    def from_environment(
        cls, device_type: str = "cpu", num_nodes: int = 1, timeout_seconds: float | None = None, grouped: bool = False
    ) -> World:
        """Join the other ranks and return the world that this process was started in. Collective.

        With ``grouped``, a single process creates torch's default group too, for libraries that need one.

        ``timeout_seconds`` limits collectives; None means torch's default of 30 minutes. A default group that exists
        already is used as it is.

        Raises:
            ConfigurationError: the launcher's variables contradict one another, or a rank has no device.
        """
        place = placement(num_nodes)
        device = take_device(device_type, place)
        if (place.size > 1 or grouped) and not is_initialized():
            backend = group_backend(device_type)
            share_cores(place)
            meet(place, backend, None if timeout_seconds is None else timedelta(seconds=timeout_seconds))
        if not is_rehearsed():
            own_records().record_joined(place.rank)
            set_rank_zero_functions(place.rank)
        return cls(place, device)

    @contextlib.contextmanager
    def variables(self) -> Iterator[None]:
        """Set RANK, LOCAL_RANK and WORLD_SIZE for this process, for a library that reads them.

        LOCAL_RANK is the index of the device, if there is one. On exit the environment is restored, including any
        changes by the library.
        """
        local_rank = self.local_rank if self.device.index is None else self.device.index
        with variables_set({"RANK": str(self.rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(self.size)}):
            yield

    @property
    def control(self) -> dist.ProcessGroup:
        """The CPU process group for control messages, created on first use. Collective the first time.

        Raises:
            ConfigurationError: this is the world of a single process, or its groups are set aside.
        """
        refuse_aside()
        if not self._control:
            if self.is_alone:
                raise ConfigurationError("A world of one process has no control group: its collectives are identities.")
            self._join_control()
        return self._control[0]

    def _join_control(self) -> None:
        self._control.append(dist.new_group(backend="gloo"))
        if (board := share_board(self._control[0])) is not None:
            self._board.append(board)

    def share_data(self, layout: Layout) -> None:
        """Read the shard of the data that belongs to this rank's place in a layout, or compute a part of it."""
        self.data_rank, self.data_size = self.rank // layout.copies, layout.data_size
        self.identical = layout.copies // layout.cp
        layer, part, stage = layout.place_of(self.rank)
        self.identical_group = self.data_rank * layout.cp + part
        self.counts_data = layer == stage == 0

    def close(self) -> None:
        """Destroy the control group; torch's default group stays. Safe to be called twice."""
        _close_board(self._board)
        destroy_group(self._control)

    def apart(self) -> World:
        """Return a world of the same ranks whose objects and barriers use a separate process group. Collective.

        For use in another thread: its collectives do not mix with those of other threads. Close it after use.
        """
        world = World(self.placement, self.device)
        world.data_rank, world.data_size, world.identical = self.data_rank, self.data_size, self.identical
        world.identical_group, world.counts_data = self.identical_group, self.counts_data
        if not self.is_alone:
            world._control.append(dist.new_group(backend="gloo"))
        return world

    def control_reduce(self, numbers: Sequence[float]) -> Pending:
        """Start summing each of some numbers over all ranks, in float64; ``wait`` returns the sums. Collective."""
        if self.is_alone:
            return _Known([self.size * number for number in numbers])
        refuse_aside()
        if not self._control:
            self._join_control()
        if self._board and len(numbers) <= CAPACITY:
            return self._board[0].post(numbers)
        return _OverGloo(torch.tensor(numbers, dtype=torch.float64), self._control[0])

    @property
    def sums_in_memory(self) -> bool:
        """Whether ``sum_in_memory`` sums tensors that are not too large. Collective the first time."""
        if self.is_alone or self.device.type != "cpu":
            return False
        refuse_aside()
        if not self._control:
            self._join_control()
        return bool(self._board) and self._board[0].tensors is not None

    def sum_in_memory(self, tensor: Tensor, factor: float = 1.0) -> bool:
        """Replace a tensor by the sum of ``factor`` times it through the memory that the ranks share. Collective.

        Return False, without communication, where that is not possible: ranks on several nodes or on other devices than
        CPUs, and a large tensor. All ranks must give the same shape, dtype and layout.
        """
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.dtype is torch.bool:
            return False
        sums = self._board[0].tensors if self.sums_in_memory else None
        if sums is None or tensor.nbytes > sums.most_bytes:
            return False
        sums.add(tensor, factor)
        return True

    def all_reduce(self, tensor: Tensor, op: ReduceName = "sum") -> Tensor:
        """Reduce ``tensor`` over all ranks, in place, and return it. Collective.

        Raises:
            UnknownNameError: ``op`` is not one of sum, mean, min, max.
            ConfigurationError: the mean of a tensor of integers.
        """
        if op not in _REDUCTIONS:
            raise unknown("op", op, _REDUCTIONS)
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigurationError(f"op='mean' does not fit a tensor of {tensor.dtype}: use 'sum', or .float().")
        if self.size == 1:
            return tensor
        if op in ("min", "max") or not self.sum_in_memory(tensor):
            dist.all_reduce(tensor, _REDUCTIONS[op], group=self._group_for(tensor))
        # gloo has no mean.
        return tensor.div_(self.size) if op == "mean" else tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, [size, *shape]; all must have the same shape. Collective."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        if tensor.dtype is torch.bool:
            # gloo sends none.
            return self.all_gather(tensor.view(torch.uint8)).view(torch.bool)
        gathered = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather(list(gathered.unbind()), tensor.detach().contiguous(), group=self._group_for(tensor))
        return gathered

    def all_to_all(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """Send ``tensors[rank]`` to each rank; return the tensors that the ranks have sent to this one. Collective.

        Args:
            tensors: 1-d tensors of the same dtype and device, one for each rank.
            sizes: the number of elements that each rank sends to this one.
        """
        if self.size == 1:
            return list(tensors)
        sent = torch.cat(list(tensors))
        received = sent.new_empty(sum(sizes))
        group = self._group_for(sent)
        dist.all_to_all_single(received, sent, list(sizes), [tensor.numel() for tensor in tensors], group=group)
        return list(received.split(list(sizes)))

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with that of rank ``src``, and return it. Collective."""
        if self.size > 1:
            dist.broadcast(tensor, src, group=self._group_for(tensor))
        return tensor

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective."""
        if not self.is_alone:
            self.control.barrier().wait()

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src``. Pickled; one collective up to 16 KiB, else two. Collective."""
        return obj if self.is_alone else broadcast_object(obj, src, self.control)

    def all_gather_object(self, obj: T, size: FrameSize | None = None) -> list[T]:
        """Return the objects of all ranks. Pickled; one collective if all are small, else two. Collective.

        Small means 16 KiB on up to 64 ranks. On more ranks the limit falls to 512 bytes, so that all buffers together
        take about 1 MiB. A repeated exchange passes its own ``size``, which adapts to the objects.
        """
        return [obj] * self.size if self.is_alone else all_gather_object(obj, self.control, size)

    def gather_object(self, obj: T) -> list[T] | None:
        """Return the objects of all ranks on rank 0, None on others. Pickled; two collectives. Collective."""
        if self.is_alone:
            return [obj] * self.size if self.is_global_zero else None
        return gather_object(obj, self.control)

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        # If the device is not the CPU, CPU tensors use the control group: a default group that the user created with
        # only NCCL cannot send them.
        return self.control if tensor.device.type == "cpu" and self.device.type != "cpu" else None


_REDUCTIONS: dict[str, Any] = (
    {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    if dist.is_available()
    else dict.fromkeys(("sum", "mean", "min", "max"))
)


def _close_board(held: list[Board]) -> None:
    """Release the board in the list, if any."""
    for board in held:
        board.close()
    held.clear()
