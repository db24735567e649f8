"""Locates this rank's piece of each parameter in DeepSpeed's flat tensors, at every stage of ZeRO.

The master weights of a group of parameters are one flat tensor, of which each rank has a padded part; so is each of the
optimizer's moments. State on a disk is in memory only while its group is open.

Everything here reads private attributes of DeepSpeed's optimizers, as DeepSpeed offers no public access to pieces: only
to full tensors, gathered. It was checked with DeepSpeed 0.19.8; tests/strategies/test_deepspeed_state.py compares the
pieces with plain torch under every stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

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
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_split(parameter: Tensor) -> bool:
    """Whether stage 3 has split a parameter over the ranks."""
    return hasattr(parameter, "ds_id")


def even_piece(count: int, world: World) -> tuple[int, int]:
    """Return the start and length of this rank's piece of ``count`` elements, as stage 3 splits, without padding."""
    # Rounded up as in DeepSpeed, so the last ranks may have less than the others, or nothing.
    size = -(-count // world.size)
    start = min(size * world.rank, count)
    return start, min(size, count - start)


def local_piece(parameter: Any, world: World) -> tuple[Tensor, int]:
    """Return this rank's piece of a split parameter, in the dtype to compute in, and its start."""
    start, length = even_piece(parameter.ds_numel, world)
    return parameter.ds_tensor.detach().narrow(0, 0, length), start


@torch.no_grad()
def keep_equal(exact: Tensor, rounded: Tensor) -> None:
    """Replace the elements of an fp32 tensor that, rounded, do not equal those of another tensor."""
    rounded = rounded.to(exact.device)
    exact.copy_(torch.where(exact.to(rounded.dtype) == rounded, exact, rounded.to(exact.dtype)))


def is_flat(value: Any) -> bool:
    """Whether a slot of a flat tensor's state has a value for each of its elements, and is not a number for all."""
    return isinstance(value, Tensor) and value.dim() > 0


def gathered(piece: Tensor, start: int, shape: tuple[int, ...], world: World) -> Tensor:
    """Return the full tensor of which each rank has a piece of a flattened one, or nothing. Collective."""
    full = torch.zeros(torch.Size(shape).numel(), dtype=piece.dtype, device=world.device)
    full.narrow(0, start, piece.numel()).copy_(piece)
    # Each element has bits other than zero on at most one rank. Added as integers they stay what they are, those of
    # -0.0 and NaN included; added as floats, -0.0 + 0.0 would be 0.0.
    world.all_reduce(full.view(torch.int32) if piece.dtype == torch.float32 else full)
    return full.view(shape)


# Classes of DeepSpeed that step the inner optimizer in the calling thread. ZenFlow and SuperOffload step in
# processes of their own, so that watching the inner optimizer's ``step`` would tell nothing.
_STEPS_IN_THIS_THREAD = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")


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
        elif self.inner is not None:
            bf16 = hasattr(self.zero, "bf16_groups")
            self.flats = self.zero.fp32_groups_flat_partition if bf16 else self.zero.single_partition_of_fp32_groups
            members = self.zero.bf16_groups if bf16 else self.zero.bit16_groups
            self.groups = [[self._mapped(one) for one in group] for group in members]
        # Frozen parameters and those without elements are in no group.
        self.trained = {id(piece.parameter) for group in self.groups for piece in group}

    def _even(self, parameter: Any) -> Piece:
        # Stage 3 splits each parameter separately, and concatenates the pieces in the flat tensor.
        _, offset, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return Piece(parameter, int(offset), *even_piece(parameter.ds_numel, self.world))

    @staticmethod
    def _mapped(parameter: Any) -> Piece:
        # Stages 1 and 2 split the flat tensor, so that a piece may be any range of a parameter.
        mapping = parameter._hp_mapping
        if mapping is None:
            # No element of this parameter is in this rank's part of the flat tensor.
            return Piece(parameter, 0, 0, 0)
        here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Piece(parameter, int(there.start), int(here.start), int(here.numel))

    @property
    def stepping(self) -> Optimizer | None:
        """The optimizer that changes the state only in its ``step``, or None."""
        here = type(self.zero).__name__ in _STEPS_IN_THIS_THREAD and not getattr(self.zero, "zenflow", False)
        return self.inner if here else None

    def swapped(self, group: int) -> bool:
        """Whether the state of a group is on a disk."""
        return self.stage3 and bool(self.zero._swappable_optimizer_subgroup(group))

    @contextlib.contextmanager
    def opened(self, group: int, write: bool = False) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Hold a group's flat master weights and optimizer state in memory.

        Args:
            write: whether changes are written back to the disk, if the group lives there.
        """
        swapped = self.swapped(group)
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_in(group)
        flat = self.flats[group]
        try:
            # While a group from a disk is open, the tensor's data is a buffer that DeepSpeed lends it.
            yield flat.data if swapped else flat.detach(), self.inner.state.get(flat, {})
        finally:
            if swapped and write:
                self.zero._optimizer_states_and_gradient_swap_out(group)
            elif swapped:
                self.zero._release_swap_buffers(group)

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
        self.zero._partition_all_parameters()
        for number in range(len(self.groups)):
            with self.opened(number):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
        # Otherwise the next forward pass would gather from ZeRO++'s second copy inside the node (hpZ), which is stale.
        self.zero.invalidate_secondary_tensor()
