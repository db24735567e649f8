"""``World``: this process among the ranks, and the collectives between them.

One process is the same class with size 1: its collectives are identities, so nobody asks "are we distributed?".
"""

from __future__ import annotations

import contextlib
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.errors import ConfigurationError, unknown
from ..system.environment import (
    environment_placement,
    own_records,
    set_missing,
    sets_threads,
    threads_for_ranks,
    usable_cores,
    variables_set,
)
from ..system.launcher_env import Launcher, Placement, check_devices
from .rendezvous import destroy_group, is_initialized, meet
from .shared_memory_reduce import CAPACITY, TOKEN_BYTES, Board, SharedMemory

__all__ = ["Launcher", "Pending", "Placement", "World", "check_devices", "placement"]

T = TypeVar("T")
ReduceName = Literal["sum", "mean", "min", "max"]

# Objects travel in a buffer of this size, so that ranks need not agree on a length first; its head is the true length.
_BUFFER_BYTES = 16 * 1024
_HEADER_BYTES = 8


class Pending(Protocol):
    """A collective under way."""

    def wait(self) -> Any: ...
    def is_completed(self) -> bool: ...


class _Done:
    """The collective of one process: over before it began."""

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_DONE = _Done()


def placement(num_nodes: int = 1) -> Placement:
    """Return where this process stands, without side effects.

    A torch.distributed group that exists already is believed first, then the variables of torchrun or phalanx, of SLURM
    and of Open MPI. ``num_nodes`` only serves where none of them tells how the ranks lie on the nodes.

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


class World:
    """This process among the ranks.

    Several worlds in one process share torch's default group, which is never destroyed by one of them; each builds a
    group of its own on the CPU, for control, at its first collective that needs it.
    """

    def __init__(self, place: Placement, device: torch.device) -> None:
        self.rank = place.rank
        self.size = place.size
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.node_rank = place.node_rank
        self.num_nodes = place.num_nodes
        self.placement = place
        self.device = device
        self.is_global_zero = place.rank == 0
        # Which part of the data this rank sees, of how many: strategies in which several ranks see the same set them.
        self.data_rank = place.rank
        self.data_size = place.size
        self._control: list[dist.ProcessGroup] = []
        self._board: list[Board] = []
        # A world that nobody closed: when it is let go of, or when this process exits.
        weakref.finalize(self, destroy_group, self._control)
        weakref.finalize(self, _close_board, self._board)

    def __repr__(self) -> str:
        return f"World(rank={self.rank}, size={self.size}, device={str(self.device)!r})"

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> World:
        """Return the world of one process on ``device``, whatever the environment says."""
        return cls(Placement(), torch.device(device))

    @classmethod
    def from_environment(
        cls,
        device_type: str = "cpu",
        num_nodes: int = 1,
        backend: str | None = None,
        timeout_seconds: float | None = None,
        grouped: bool = False,
    ) -> World:
        """Return the world that this process was started in, and meet the other ranks. Collective.

        With ``grouped`` one process alone has torch's default group too, for libraries that ask for one.

        ``backend`` is gloo on a CPU and "cpu:gloo,cuda:nccl" on CUDA; ``timeout_seconds`` bounds its collectives, with
        torch's default of 30 minutes where it is None. A default group that exists already is used as it is.

        Raises:
            ConfigurationError: the launcher's variables contradict one another, or a rank has no device.
        """
        place = placement(num_nodes)
        device = _device(device_type, place)
        if (place.size > 1 or grouped) and not is_initialized():
            backend = backend or ("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
            _share_cores(place)
            meet(place, backend, None if timeout_seconds is None else timedelta(seconds=timeout_seconds))
        own_records().record_joined(place.rank)
        return cls(place, device)

    @contextlib.contextmanager
    def variables(self) -> Iterator[None]:
        """Have RANK, LOCAL_RANK and WORLD_SIZE tell where this process stands, for a library that reads them there.

        LOCAL_RANK is the index of the device, where there is one. At the end the environment is what it was, whatever
        the library did to it.
        """
        with variables_set(self._variables()):
            yield

    def set_variables(self) -> Callable[[], None]:
        """Set those that are lacking for longer; return what takes them away again."""
        return set_missing(self._variables())

    def _variables(self) -> dict[str, str]:
        local_rank = self.local_rank if self.device.index is None else self.device.index
        return {"RANK": str(self.rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(self.size)}

    @property
    def control(self) -> dist.ProcessGroup:
        """The group on the CPU for what steers the run, built when it is first asked for. Collective the first time.

        Raises:
            ConfigurationError: this is the world of one process.
        """
        if not self._control:
            if self.size == 1:
                raise ConfigurationError("A world of one process has no control group: its collectives are identities.")
            self._control.append(dist.new_group(backend="gloo"))
            if self.local_size == self.size and (board := self._shared_board()) is not None:
                self._board.append(board)
        return self._control[0]

    def _shared_board(self) -> Board | None:
        """Return the memory that the ranks of one node reduce small numbers in; None where one cannot share it."""
        token, memory = os.urandom(TOKEN_BYTES), None
        size = Board.size(self.size)
        with contextlib.suppress(OSError):
            memory = SharedMemory(size) if self.is_global_zero else None
        offer = self.broadcast_object(None if memory is None else (memory.place, token))
        if offer is not None and memory is None:
            with contextlib.suppress(OSError, ValueError):
                memory = SharedMemory(size, offer[0])
        elif memory is not None:
            memory.bytes[-TOKEN_BYTES:] = token
        self.control.barrier().wait()
        # In another container the same number may be that of another process, and of other memory.
        known = memory is not None and offer is not None and memory.bytes[-TOKEN_BYTES:] == offer[1]
        answers = self.all_gather_object((known, os.getpid()))
        if memory is not None:
            memory.release_name()
        if all(good for good, _ in answers) and memory is not None:
            return Board(memory, self.rank, [pid for _, pid in answers])
        if memory is not None:
            memory.close()
        return None

    @property
    def counts_data(self) -> bool:
        """Whether what this rank makes of its data counts: of ranks that see the same, it is the first one's."""
        return self.rank % (self.size // self.data_size) == 0

    def close(self) -> None:
        """Destroy the control group; torch's default group stays. Safe to be called twice."""
        _close_board(self._board)
        destroy_group(self._control)

    def apart(self) -> World:
        """Return a world of the same ranks whose objects and barriers travel on a group of their own. Collective.

        For a thread of its own: nothing that it exchanges meets what other threads exchange. Close it, or let go of it.
        """
        world = World(self.placement, self.device)
        world.data_rank, world.data_size = self.data_rank, self.data_size
        if self.size > 1:
            world._control.append(dist.new_group(backend="gloo"))
        return world

    def control_reduce(self, vector: Tensor) -> Pending:
        """Start summing a float64 CPU tensor over all ranks, in place; wait for what is returned. Collective."""
        if self.size == 1:
            return _DONE
        group = self.control
        if self._board and vector.numel() <= CAPACITY:
            return self._board[0].post(vector)
        # Straight on the group: torch.distributed.all_reduce costs several times as much in Python.
        return group.allreduce([vector])

    def all_reduce(self, tensor: Tensor, op: ReduceName = "sum") -> Tensor:
        """Reduce ``tensor`` over all ranks, in place, and return it. Collective.

        Raises:
            UnknownNameError: ``op`` is none of sum, mean, min, max.
            ConfigurationError: the mean of a tensor of integers.
        """
        if op not in _REDUCTIONS:
            raise unknown("op", op, _REDUCTIONS)
        if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ConfigurationError(f"op='mean' does not fit a tensor of {tensor.dtype}: use 'sum', or .float().")
        if self.size == 1:
            return tensor
        dist.all_reduce(tensor, _REDUCTIONS[op], group=self._group_for(tensor))
        # gloo has no mean of its own.
        return tensor.div_(self.size) if op == "mean" else tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, [size, *shape]; all have one shape. Collective."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        gathered = tensor.new_empty((self.size, *tensor.shape))
        dist.all_gather(list(gathered.unbind()), tensor.detach().contiguous(), group=self._group_for(tensor))
        return gathered

    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``tensor`` with that of rank ``src``, and return it. Collective."""
        if self.size > 1:
            dist.broadcast(tensor, src, group=self._group_for(tensor))
        return tensor

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective."""
        if self.size > 1:
            self.control.barrier().wait()

    def broadcast_object(self, obj: T, src: int = 0) -> T:
        """Return the object of rank ``src``; pickled, in one collective up to 16 KiB and two above. Collective."""
        if self.size == 1:
            return obj
        payload = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL) if self.rank == src else b""
        buffer = _framed(payload)
        dist.broadcast(_as_tensor(buffer), src, group=self.control)
        length = _length(buffer)
        data = buffer[_HEADER_BYTES : _HEADER_BYTES + length]
        if length > _BUFFER_BYTES - _HEADER_BYTES:
            data = bytearray(payload) if self.rank == src else bytearray(length)
            dist.broadcast(_as_tensor(data), src, group=self.control)
        return obj if self.rank == src else pickle.loads(data)

    def all_gather_object(self, obj: T) -> list[T]:
        """Return the objects of all ranks; pickled, in one collective while small and two above. Collective.

        Small is 16 KiB on up to 64 ranks; on more, so that what all have sent stays about 1 MiB, down to 512 bytes.
        """
        if self.size == 1:
            return [obj]
        payload = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        room = frame_bytes(self.size)
        frames = self._gather_bytes(_framed(payload, room))
        lengths = [_length(frame) for frame in frames]
        longest = max(lengths)
        if longest > room - _HEADER_BYTES:
            frames = self._gather_bytes(bytearray(payload.ljust(longest, b"\0")))
            return [pickle.loads(frame[:length]) for frame, length in zip(frames, lengths, strict=True)]
        end = _HEADER_BYTES
        return [pickle.loads(frame[end : end + length]) for frame, length in zip(frames, lengths, strict=True)]

    def gather_object(self, obj: T) -> list[T] | None:
        """Return the objects of all ranks on rank 0, elsewhere None; pickled, in two collectives. Collective."""
        if self.size == 1:
            return [obj]
        payload = pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
        longest = torch.tensor([len(payload)])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.control)
        room = _HEADER_BYTES + int(longest)
        frames = [bytearray(room) for _ in range(self.size)] if self.is_global_zero else []
        into = [_as_tensor(frame) for frame in frames] or None
        dist.gather(_as_tensor(_framed(payload, room)), into, dst=0, group=self.control)
        if not self.is_global_zero:
            return None
        return [pickle.loads(frame[_HEADER_BYTES : _HEADER_BYTES + _length(frame)]) for frame in frames]

    def _gather_bytes(self, source: bytearray) -> list[memoryview]:
        """Gather buffers of one length in one collective."""
        gathered = [bytearray(len(source)) for _ in range(self.size)]
        dist.all_gather([_as_tensor(buffer) for buffer in gathered], _as_tensor(source), group=self.control)
        return [memoryview(buffer) for buffer in gathered]

    def _group_for(self, tensor: Tensor) -> dist.ProcessGroup | None:
        # Where gradients live elsewhere, tensors on the CPU travel on the control group: a default group that a user
        # made for NCCL alone has no way to send them.
        return self.control if tensor.device.type == "cpu" and self.device.type != "cpu" else None


_REDUCTIONS: dict[str, Any] = (
    {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
    if dist.is_available()
    else dict.fromkeys(("sum", "mean", "min", "max"))
)


# Of all ranks' buffers together, where there are many; and the least that each has.
_EXCHANGE_BYTES = 1 << 20
_LEAST_BUFFER_BYTES = 512


def frame_bytes(ranks: int) -> int:
    """Return the bytes of the buffer in which each of so many ranks sends an object to all."""
    return max(_LEAST_BUFFER_BYTES, min(_BUFFER_BYTES, _EXCHANGE_BYTES // ranks))


def _framed(payload: bytes, size: int = _BUFFER_BYTES) -> bytearray:
    """Return the buffer of ``size`` bytes of a payload: its length, then the payload if there is room for it."""
    buffer = bytearray(size)
    buffer[:_HEADER_BYTES] = len(payload).to_bytes(_HEADER_BYTES, "little")
    if len(payload) <= size - _HEADER_BYTES:
        buffer[_HEADER_BYTES : _HEADER_BYTES + len(payload)] = payload
    return buffer


def _length(frame: bytearray | memoryview) -> int:
    return int.from_bytes(frame[:_HEADER_BYTES], "little")


def _as_tensor(buffer: bytearray) -> Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)


def _device(device_type: str, place: Placement) -> torch.device:
    """Return this rank's device, and make it CUDA's current one."""
    if device_type != "cuda":
        return torch.device(device_type)
    count = torch.cuda.device_count()
    # A scheduler that hands each task one device shows it to the task as number 0.
    index = 0 if count == 1 and place.launcher in ("slurm", "mpi") else place.local_rank
    if index >= count:
        raise ConfigurationError(
            f"Local rank {place.local_rank} has no CUDA device: this process sees {count} for {place.local_size} ranks "
            "on the node. Start fewer ranks, or check CUDA_VISIBLE_DEVICES."
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _share_cores(place: Placement) -> None:
    """Give this rank its share of the cores, where neither the user nor the launcher did."""
    bound = usable_cores() < (os.cpu_count() or 1)
    if place.launcher in ("slurm", "mpi") and not bound and not sets_threads():
        torch.set_num_threads(threads_for_ranks(place.local_size))


def _close_board(held: list[Board]) -> None:
    """Let go of the board in the list, if there is one."""
    for board in held:
        board.close()
    held.clear()
