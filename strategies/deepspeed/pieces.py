"""Where this rank's piece of each parameter lies in DeepSpeed's flat tensors, at every stage of ZeRO.

The master weights and the optimizer's moments of a group of parameters are one flat tensor each, of which a rank has
its part, padded. With state on a disk they are read into buffers while a group is open, and there is nothing between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

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


def whole_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of a whole parameter, also while it is split."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_split(parameter: Tensor) -> bool:
    """Whether stage 3 has split a parameter."""
    return hasattr(parameter, "ds_id")


def even_piece(count: int, world: World) -> tuple[int, int]:
    """Return start and length of a rank's piece of ``count`` elements, as stage 3 cuts them, without padding."""
    size = -(-count // world.size)
    start = min(size * world.rank, count)
    return start, min(size, count - start)


def kept_piece(parameter: Any, world: World) -> tuple[Tensor, int]:
    """Return the piece of a parameter that stage 3 keeps on this rank, in the dtype it computes in, and its start."""
    start, length = even_piece(parameter.ds_numel, world)
    return parameter.ds_tensor.detach().narrow(0, 0, length), start


# What steps its optimizer on the thread that calls; ZenFlow and SuperOffload have processes of their own do so.
_STEP_HERE = ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3", "BF16_Optimizer")


class FlatGroups:
    """The groups of an engine's optimizer: flat tensors, and the pieces in them."""

    def __init__(self, engine: Any, world: World) -> None:
        self.zero = engine.optimizer
        self.inner: Any = getattr(self.zero, "optimizer", None)
        self.world = world
        self.stage3 = hasattr(self.zero, "fp16_partitioned_groups_flat")
        self.groups: list[list[Piece]] = []
        if self.stage3:
            self.flats = self.zero.fp32_partitioned_groups_flat
            self.groups = [[self._even(one) for one in group] for group in self.zero.fp16_groups]
        elif self.inner is not None:
            bf16 = hasattr(self.zero, "bf16_groups")
            self.flats = self.zero.fp32_groups_flat_partition if bf16 else self.zero.single_partition_of_fp32_groups
            members = self.zero.bf16_groups if bf16 else self.zero.bit16_groups
            self.groups = [[self._mapped(one) for one in group] for group in members]
        self.trained = {id(piece.parameter) for group in self.groups for piece in group}

    def _even(self, parameter: Any) -> Piece:
        _, offset, _ = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return Piece(parameter, int(offset), *even_piece(parameter.ds_numel, self.world))

    @staticmethod
    def _mapped(parameter: Any) -> Piece:
        mapping = parameter._hp_mapping
        if mapping is None:
            return Piece(parameter, 0, 0, 0)
        here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Piece(parameter, int(there.start), int(here.start), int(here.numel))

    @property
    def stepping(self) -> Optimizer | None:
        """The optimizer whose ``step`` alone changes the slots, or None."""
        here = type(self.zero).__name__ in _STEP_HERE and not getattr(self.zero, "zenflow", False)
        return self.inner if here else None

    def swapped(self, group: int) -> bool:
        """Whether the state of a group lies on a disk."""
        return self.stage3 and bool(self.zero._swappable_optimizer_subgroup(group))

    @contextlib.contextmanager
    def opened(self, group: int, write: bool = False) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Have a group's flat master weights and slots in memory; ``write`` puts them back where they live."""
        swapped = self.swapped(group)
        if swapped:
            self.zero._optimizer_states_and_gradient_swap_in(group)
        flat = self.flats[group]
        try:
            # Read from a disk, it is a buffer that the tensor is given for a while.
            yield flat.data if swapped else flat.detach(), self.inner.state.get(flat, {})
        finally:
            if swapped and write:
                self.zero._optimizer_states_and_gradient_swap_out(group)
            elif swapped:
                self.zero._release_swap_buffers(group)

    def masters(self) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each piece and its fp32 elements, to be used before the next one is asked for."""
        for number, pieces in enumerate(self.groups):
            with self.opened(number) as (flat, _):
                for piece in pieces:
                    yield piece, flat.narrow(0, piece.offset, piece.length)

    def show_masters(self) -> None:
        """Write the master weights into the parameters that are computed with. Collective in stages 1 and 2."""
        if not self.stage3:
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for number in range(len(self.groups)):
            with self.opened(number):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
        self.zero.invalidate_secondary_tensor()
