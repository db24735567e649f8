"""Locates this rank's piece of each parameter in DeepSpeed's flat tensors, at every stage of ZeRO.

The master weights of a group of parameters are one flat tensor, of which each rank has a padded part; so is each of the
optimizer's moments. State on a disk is in memory only while its group is open.

DeepSpeed's functions for the state of a parameter, such as ``safe_get_full_fp32_param``, gather full tensors. So the
places of pieces are computed here, as DeepSpeed 0.19.8 divides its flat tensors. The pieces are compared with plain
torch under every stage in tests/strategies/test_deepspeed_state.py.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...framework.distributed.world import World


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``start + length`` of a flattened parameter, at ``offset`` of its group's flat tensor."""

    parameter: nn.Parameter
    offset: int
    start: int
    length: int


def full_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a full parameter, also while it is sharded."""
    # Private to DeepSpeed: the public ways to the shape of a sharded parameter gather it first, on all ranks.
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def set_full_shape(parameter: Any, shape: torch.Size) -> None:
    """Set the shape that a sharded parameter gets when it is gathered."""
    parameter.ds_shape = shape


def full_size(parameter: Tensor) -> int:
    """Return the number of elements of a full parameter, also while it is sharded."""
    return math.prod(full_shape(parameter))


def is_split(parameter: Tensor) -> bool:
    """Whether stage 3 has split a parameter over the ranks."""
    return hasattr(parameter, "ds_shape")


def even_piece(count: int, world: World) -> tuple[int, int]:
    """Return the start and length of this rank's piece of ``count`` elements, as stage 3 splits, without padding."""
    # Rounded up as in DeepSpeed, so the last ranks may have less than the others, or nothing.
    size = -(-count // world.size)
    start = min(size * world.rank, count)
    return start, min(size, count - start)


def partition_of(parameter: Any) -> Any:
    """Return this rank's part of a split parameter, padded: the tensor that DeepSpeed gathers from."""
    # Private to DeepSpeed: its public functions read and write the masters of trained parameters, not the parts that
    # are gathered, which frozen parameters have too.
    return parameter.ds_tensor


def is_on_disk(parameter: Any) -> bool:
    """Whether this rank's part of a split parameter is on a disk, and not in memory as well."""
    return bool(partition_of(parameter).status.name == "NOT_AVAILABLE")


def local_piece(parameter: Any, world: World) -> tuple[Tensor, int]:
    """Return this rank's piece of a split parameter, in the dtype to compute in, and its start."""
    start, length = even_piece(full_size(parameter), world)
    return partition_of(parameter).detach().narrow(0, 0, length), start


@torch.no_grad()
def write_piece(parameter: Any, values: Tensor) -> None:
    """Replace this rank's piece of a split parameter, where it lives."""
    if not is_on_disk(parameter):
        partition_of(parameter).narrow(0, 0, values.numel()).copy_(values)
        return
    padded = nn.functional.pad(values, (0, parameter.partition_numel() - values.numel()))
    parameter.nvme_swapper.swap_out_partitioned_params(dst_fp16_params=[parameter], src_fp32_params=[padded])


@torch.no_grad()
def copy_unequal(exact: Tensor, rounded: Tensor) -> None:
    """Replace the elements of an fp32 tensor that, rounded, do not equal those of another tensor."""
    rounded = rounded.to(exact.device)
    exact.copy_(torch.where(exact.to(rounded.dtype) == rounded, exact, rounded.to(exact.dtype)))


def is_flat(value: Any) -> bool:
    """Whether a slot of a flat tensor's state has a value for each of its elements, and is not a number for all."""
    return isinstance(value, Tensor) and value.dim() > 0


class FlatGroups:
    """The parameter groups of an engine's optimizer: their flat tensors, and the pieces in them."""

    def __init__(self, engine: Any, world: World) -> None:
        self.zero = engine.optimizer
        self.inner: Any = getattr(self.zero, "optimizer", None)
        self.world = world
        self.stage3 = hasattr(self.zero, "fp16_partitioned_groups_flat")
        self.groups: list[list[Piece]] = []
        # Stage 3, stage 1 in bf16, and stages 1 and 2 otherwise are three classes, each with its own names.
        if self.stage3:
            self.flats = self.zero.fp32_partitioned_groups_flat
            self.groups = [[self._even(one) for one in group] for group in self.zero.fp16_groups]
        elif hasattr(self.zero, "bf16_groups"):
            self.flats = self.zero.fp32_groups_flat_partition
            for members, flat in zip(self.zero.bf16_groups, self.flats, strict=True):
                starts = accumulate((one.numel() for one in members[:-1]), initial=0)
                self.groups.append(self._ranges(members, starts, flat.numel()))
        elif self.inner is not None:
            self.flats = self.zero.single_partition_of_fp32_groups
            ordered = zip(self.zero.round_robin_bit16_groups, self.zero.round_robin_bit16_offsets, strict=True)
            for (members, starts), flat in zip(ordered, self.flats, strict=True):
                self.groups.append(self._ranges(members, starts, flat.numel()))
            if self.zero.round_robin_gradients:
                self._link_in_order()
        # Frozen parameters and those without elements are in no group.
        self.trained = {id(piece.parameter) for group in self.groups for piece in group}

    def _even(self, parameter: Any) -> Piece:
        # Stage 3 splits each parameter separately, and concatenates the pieces in the flat tensor.
        _, offset, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return Piece(parameter, int(offset), *even_piece(full_size(parameter), self.world))

    def _ranges(self, members: Iterable[nn.Parameter], starts: Iterable[int], size: int) -> list[Piece]:
        """Return the pieces of a group in stages 1 and 2, which split its flat tensor into equal parts.

        Args:
            members: the parameters of the group.
            starts: where each of them starts in the flat tensor.
            size: the number of elements of this rank's part.
        """
        first, found = self.world.rank * size, []
        for parameter, start in zip(members, starts, strict=True):
            begin = max(start, first)
            length = min(start + parameter.numel(), first + size) - begin
            # No element of some parameters is in this rank's part of the flat tensor.
            place = (begin - first, begin - start, length) if length > 0 else (0, 0, 0)
            found.append(Piece(parameter, *place))
        return found

    def _link_in_order(self) -> None:
        """Link parameters to their ranges of flat tensors: DeepSpeed assumes the order of the group."""
        from deepspeed.utils import link_hp_params

        zero = self.zero
        for number, flat in enumerate(self.flats):
            link_hp_params(
                zero.round_robin_bit16_groups[number],
                flat,
                gradient_dict=zero.averaged_gradients,
                offload_gradient_dict=zero.offload_gradient_dict,
                use_offload=zero.cpu_offload,
                param_group_index=number,
                partition_start=self.world.rank * flat.numel(),
                partition_size=flat.numel(),
                dp_group=zero.real_dp_process_group[number],
                param_offsets=zero.round_robin_bit16_offsets[number],
            )

    @property
    def swaps(self) -> bool:
        """Whether the state of any group is on a disk."""
        return any(map(self.swapped, range(len(self.groups))))

    def swapped(self, group: int) -> bool:
        """Whether the state of a group is on a disk."""
        if not (self.stage3 and self.zero.swap_optimizer):
            return False
        size = self.zero.fp16_partitioned_groups_flat_numel[group]
        return bool(self.zero.optimizer_swapper.is_swappable_tensor(numel=size))

    @contextlib.contextmanager
    def opened(self, group: int, write: bool = False) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Hold a group's flat master weights and optimizer state in memory.

        Args:
            write: whether changes are written back to the disk, if the group lives there.
        """
        flat = self.flats[group]
        if not self.swapped(group):
            yield flat.detach(), self.inner.state.get(flat, {})
            return
        swapper = self.zero.optimizer_swapper
        swapper.swap_in_optimizer_state(flat, async_parameter=None)
        try:
            # The tensor's data is a buffer that DeepSpeed lends it.
            yield flat.data, self.inner.state.get(flat, {})
        finally:
            if write:
                swapper.swap_out_optimizer_state(flat, async_swap=False)
            else:
                swapper.release_swap_buffers(flat)
            flat.grad = None

    def masters(self) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each piece and its fp32 elements. Use them before the next is requested: a disk's buffer is reused."""
        for number, pieces in enumerate(self.groups):
            with self.opened(number) as (flat, _):
                for piece in pieces:
                    yield piece, flat.narrow(0, piece.offset, piece.length)

    def update_parameters(self) -> None:
        """Copy the master weights into the parameters to compute with. Collective in stages 1 and 2."""
        if not self.stage3:
            self.zero.update_lp_params()
            return
        # A parameter that is gathered at the moment would keep its old data.
        self.zero.parameter_offload.partition_all_parameters()
        for piece, master in self.masters():
            write_piece(piece.parameter, master)
        # Otherwise the next forward pass would gather from ZeRO++'s second copy inside the node (hpZ), which is stale.
        self.zero.invalidate_secondary_tensor()
