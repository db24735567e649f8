"""Canonical state under DeepSpeed: this rank's pieces out as shards, and in again from what is stored.

Nothing is gathered: a piece of a flat tensor is a range of a flattened parameter. Weights go to the masters and to
the parameters that are computed with; moments to the flat tensors that the optimizer keeps; step counters to each of
them, in the type that the optimizer counts in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...framework.checkpoint.stored_tensor import HeldTensor, StoredTensor, StoredTensors
from ...framework.checkpoint.write_plan import Shard
from ...framework.distributed.world import World
from ...framework.parallel.parameter_names import state_tensors
from ...framework.parallel.strategy import Slots, is_stored, parameters_of
from .pieces import FlatGroups, Piece, even_piece, is_split, kept_piece, whole_shape


class EngineState:
    """The state that an engine holds of a module; ``exact`` are fp32 pieces of parameters without a master."""

    def __init__(self, groups: FlatGroups, exact: dict[int, Tensor], world: World) -> None:
        self.groups = groups
        self.exact = exact
        self.world = world

    # ---- out ------------------------------------------------------------------------------------------------------

    def pieces(self, module: nn.Module) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """Yield each parameter once, in one order on all ranks: where this rank's piece starts, and the piece.

        A parameter that every rank holds whole, as nobody trains it, is left out. A piece is to be used before the
        next one is asked for.
        """
        for piece, master in self.groups.masters():
            yield piece.parameter, piece.start, master
        for parameter in module.parameters():
            if id(parameter) in self.groups.trained:
                continue
            found = self._untrained(parameter)
            if found is not None:
                yield parameter, found[1], found[0]

    def _untrained(self, parameter: Any) -> tuple[Tensor, int] | None:
        exact = self.exact.get(id(parameter))
        if exact is not None:
            count = torch.Size(whole_shape(parameter)).numel()
            return exact, even_piece(count, self.world)[0]
        return kept_piece(self._at_hand(parameter), self.world) if is_split(parameter) else None

    @staticmethod
    def _at_hand(parameter: Any) -> Any:
        """Return a split parameter whose piece is in memory, read from the disk where it lives there."""
        if parameter.ds_tensor.status.name == "NOT_AVAILABLE":
            parameter.nvme_swapper.swap_in([parameter], async_op=False)
        return parameter

    def model_state(self, module: nn.Module) -> dict[str, Shard]:
        """Return this rank's part of a module's weights, and on rank 0 the buffers, by name."""
        found: dict[int, Shard] = {}
        swaps = any(self.groups.swapped(number) for number in range(len(self.groups.groups)))
        for parameter, start, piece in self.pieces(module):
            tensor = piece.clone() if swaps else piece
            found[id(parameter)] = Shard.flat(tensor, whole_shape(parameter), start)
        state: dict[str, Shard] = {}
        for name, tensor in state_tensors(module).items():
            if id(tensor) in found:
                state[name] = found[id(tensor)]
            elif isinstance(tensor, nn.Parameter) or self.world.rank == 0:
                # Buffers may differ between ranks, and those of one belong together.
                state[name] = Shard.whole(tensor.detach())
        return state

    def optimizer_state(self) -> Iterator[tuple[Tensor, Slots]]:
        """Yield each parameter that has state, and its slots."""
        for number, pieces in enumerate(self.groups.groups):
            with self.groups.opened(number) as (flat, slots):
                if not slots:
                    continue
                swapped = self.groups.swapped(number)
                for piece in pieces:
                    yield (
                        piece.parameter,
                        {slot: _taken(slot, value, flat, piece, swapped) for slot, value in slots.items()},
                    )

    # ---- in -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_model_state(self, module: nn.Module, tensors: StoredTensors) -> None:
        """Take over weights and buffers; what ``tensors`` lacks stays as it is. Collective."""
        stored: dict[int, StoredTensor] = {}
        own = state_tensors(module)
        for name, one in tensors.items():
            stored.setdefault(id(own[name]), one)
        for number, pieces in enumerate(self.groups.groups):
            if not any(id(piece.parameter) in stored for piece in pieces):
                continue
            with self.groups.opened(number, write=True) as (flat, _):
                for piece in pieces:
                    found = stored.get(id(piece.parameter))
                    if found is not None and piece.length:
                        flat.narrow(0, piece.offset, piece.length).copy_(found.read_flat(piece.start, piece.length))
        if self.groups.trained & set(stored):
            self.groups.show_masters()
        for tensor in own.values():
            if id(tensor) in stored and id(tensor) not in self.groups.trained:
                self._load_untrained(tensor, stored[id(tensor)])

    def _load_untrained(self, tensor: Any, stored: StoredTensor) -> None:
        exact = self.exact.get(id(tensor))
        start, length = even_piece(torch.Size(stored.shape).numel(), self.world)
        if exact is not None:
            exact.copy_(stored.read_flat(start, length))
        if not is_split(tensor):
            tensor.data.copy_(stored.read())
        elif tensor.ds_tensor.status.name == "NOT_AVAILABLE":
            tensor.all_gather()
            tensor.data.copy_(stored.read())
            tensor.partition(has_been_updated=True)
        elif length:
            kept_piece(tensor, self.world)[0].copy_(stored.read_flat(start, length))

    @torch.no_grad()
    def load_optimizer_state(self, optimizer: Optimizer, state: Sequence[Slots], groups: list[dict[str, Any]]) -> None:
        """Put moments, step counters and hyperparameters back. Collective."""
        for group, kept in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in kept.items() if key != "params"})
        slots = {id(one): found for one, found in zip(parameters_of(optimizer), state, strict=True)}
        inner = self.groups.inner
        for number, pieces in enumerate(self.groups.groups):
            theirs = [(piece, slots.get(id(piece.parameter), {})) for piece in pieces]
            with self.groups.opened(number, write=True) as (flat, own):
                key = self.groups.flats[number]
                fresh = _filled(theirs, flat, own, counts_in_ints(inner))
                if fresh:
                    inner.state[key] = fresh
                else:
                    inner.state.pop(key, None)
        relink = getattr(self.groups.zero, "_lazy_init_hp_params_optimizer_state", None)
        if relink is not None and all(flat in inner.state for flat in self.groups.flats):
            self.groups.zero._hp_optimizer_states_linked = False
            relink()


def counts_in_ints(optimizer: Any) -> bool:
    """Whether an optimizer counts its steps in ints, as DeepSpeed's Adams do, and not in tensors as torch's."""
    return hasattr(optimizer, "adam_w_mode")


def _taken(slot: str, value: Any, flat: Tensor, piece: Piece, swapped: bool) -> Any:
    """Return a slot's value of one parameter."""
    if slot == "step":
        return torch.tensor(float(value), dtype=torch.float32)
    if isinstance(value, Tensor) and value.dim() and value.numel() == flat.numel():
        part = value.detach().narrow(0, piece.offset, piece.length)
        return Shard.flat(part.clone() if swapped else part, whole_shape(piece.parameter), piece.start)
    return value


def _filled(theirs: Sequence[tuple[Piece, Slots]], flat: Tensor, own: Mapping[str, Any], ints: bool) -> dict[str, Any]:
    """Return a flat group's slots with the pieces of its parameters in them."""
    filled: dict[str, Any] = {}
    steps = [float(slots["step"]) for _, slots in theirs if slots.get("step") is not None]
    if steps:
        # One counter for the group: parameters that joined later count as if they had been there.
        filled["step"] = int(max(steps)) if ints else torch.tensor(max(steps), dtype=torch.float32)
    for piece, slots in theirs:
        for slot, value in slots.items():
            if slot == "step" or value is None:
                continue
            if isinstance(value, Tensor) and not whole_shape(piece.parameter):
                # A parameter without dims has moments without dims, which are kept as numbers are.
                value = HeldTensor(value)
            if not is_stored(value):
                filled.setdefault(slot, value)
                continue
            if slot not in filled:
                kept: Any = own.get(slot)
                reused = isinstance(kept, Tensor) and kept.numel() == flat.numel()
                filled[slot] = kept.zero_() if reused else torch.zeros_like(flat)
            if piece.length:
                filled[slot].narrow(0, piece.offset, piece.length).copy_(value.read_flat(piece.start, piece.length))
    return filled
