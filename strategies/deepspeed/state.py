"""Canonical state under DeepSpeed: saves this rank's pieces as shards, and loads them from stored tensors.

Nothing is gathered, because a piece of a flat tensor is a range of a flattened parameter:

- weights are read from the fp32 masters; loading writes the masters, and from these the parameters to compute with;
- moments are in the flat tensors of the optimizer's state;
- step counters are one for each flat tensor, of the type in which the optimizer counts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...framework.checkpoint.reader import StoredTensor, StoredTensors
from ...framework.checkpoint.write_plan import Shard
from ...framework.core.errors import ConfigurationError
from ...framework.core.optimizer_config import parameters_of
from ...framework.distributed.world import World
from ...framework.parallel.canonical_state import CanonicalState, Slots
from ...framework.parallel.full_tensors import assembled
from ...framework.parallel.parameter_names import state_tensors
from .flat_groups import (
    FlatGroups,
    Piece,
    copy_unequal,
    even_piece,
    full_shape,
    full_size,
    is_flat,
    is_on_disk,
    is_split,
    local_piece,
    write_piece,
)
from .lent_state import LentState
from .partial_steps import PartialSteps, Scalars, shared_scalars
from .state_slots import are_equal, as_sent, filled_slots, saved_slot, scalars_in, step_counter

if TYPE_CHECKING:
    from .sharded import Gathering

_VERSION = operator.attrgetter("_version")


class OrderedReduction(Protocol):
    """Reduces gradients in an order that the first reduction determines."""

    def learned_order(self) -> list[Tensor]: ...
    def learn_order(self, parameters: Sequence[Tensor]) -> None: ...


class PartitionedState(CanonicalState):
    """State of modules whose parameters may be partitioned, without an engine."""

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...]]:
        return {name: full_shape(tensor) for name, tensor in state_tensors(module).items()}


class EngineState(PartitionedState):
    """The state that an engine holds of a module.

    Args:
        groups: the parameter groups of the engine's optimizer.
        exact: this rank's fp32 pieces of parameters that have no master, by ``id``.
        world: the ranks over which the engine divides the state.
    """

    def __init__(self, groups: FlatGroups, exact: dict[int, Tensor], world: World) -> None:
        self.groups = groups
        self.exact = exact
        self.world = world
        self.gathering: Gathering | None = None
        """Gathers parameters of stage 3 for user code."""
        self.reduction: OrderedReduction | None = None
        """Reduces the gradients of stages 1 and 2."""
        self.lent: LentState | None = None
        """The state of the user's optimizer."""
        self.partial_steps: PartialSteps | None = None
        """Steps on pieces, once a parameter had no gradient in a window."""
        # Under stage 3 ``gathering`` writes what the user changes.
        self._parameters = [] if groups.stage3 else [piece.parameter for group in groups.groups for piece in group]
        self._seen = self._changes()

    def reduction_order(self) -> list[Tensor]:
        return [] if self.reduction is None else self.reduction.learned_order()

    def use_reduction_order(self, order: Sequence[Tensor]) -> None:
        if self.reduction is not None:
            self.reduction.learn_order(order)

    # ---- changes by the user --------------------------------------------------------------------------------------

    def _changes(self) -> int:
        # torch counts the changes in place of each tensor; DeepSpeed's own are changes of other tensors.
        return sum(map(_VERSION, self._parameters))

    def synchronize(self) -> None:
        """Copy the elements of parameters that the user has changed into the master weights; take back lent state."""
        if self.lent is not None:
            self.lent.take_back()
        if self.gathering is not None:
            self.gathering.take_back()
        elif self._changes() != self._seen:
            self._seen = self._changes()
            self._copy_changed_elements()

    def stop_gathering(self) -> None:
        """Make parameters of stage 3 ordinary ones again."""
        if self.gathering is not None:
            self.gathering.stop()
            self.gathering = None

    def leave_out(self, unused: Set[int], by_all: Set[int] | None) -> None:
        """Leave parameters without a gradient out of the next update.

        Args:
            unused: by ``id``, those that this rank has not used.
            by_all: those that no rank has used; None if that is not known.
        """
        if unused or self.partial_steps is not None:
            self._stepping_on_pieces().leave_out(unused, by_all)

    def _stepping_on_pieces(self) -> PartialSteps:
        """Let the engine's optimizer step on pieces, each with scalars of its own, from now on."""
        if self.partial_steps is None:
            self.partial_steps = PartialSteps(self.groups)
        return self.partial_steps

    @torch.no_grad()
    def _copy_changed_elements(self) -> None:
        for number, pieces in enumerate(self.groups.groups):
            with self.groups.opened(number, write=True) as (flat, _):
                for piece in pieces:
                    if piece.length:
                        mine = piece.parameter.detach().reshape(-1).narrow(0, piece.start, piece.length)
                        copy_unequal(flat.narrow(0, piece.offset, piece.length), mine)

    # ---- saving ---------------------------------------------------------------------------------------------------

    def pieces(self, module: nn.Module) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """Yield each parameter, the start of this rank's piece of it, and the piece; in the same order on all ranks.

        Parameters that are not trained and that every rank holds in full are left out. Use a piece before the next one
        is requested: it may be in a buffer that is reused.
        """
        self.synchronize()
        for piece, master in self.groups.masters():
            yield piece.parameter, piece.start, master
        for parameter in module.parameters():
            if id(parameter) in self.groups.trained:
                continue
            found = self._untrained(parameter)
            if found is not None:
                yield parameter, *found

    def _untrained(self, parameter: Any) -> tuple[int, Tensor] | None:
        """Return the start of this rank's piece of a parameter that is not trained, and the piece; None if each rank
        holds it in full. An fp32 piece takes the elements that the user has changed.
        """
        exact = self.exact.get(id(parameter))
        if exact is not None:
            start, length = even_piece(full_size(parameter), self.world)
            split = is_split(parameter)
            mine = self._in_memory(parameter)[1] if split else parameter.detach().reshape(-1)[start : start + length]
            # Such as a teacher that is updated by hand.
            copy_unequal(exact, mine)
            return start, exact
        return self._in_memory(parameter) if is_split(parameter) else None

    def _in_memory(self, parameter: Any) -> tuple[int, Tensor]:
        """Return the start of this rank's piece of a split parameter, and the piece, after reading it from disk."""
        if is_on_disk(parameter):
            parameter.nvme_swapper.swap_in([parameter], async_op=False)
        piece, start = local_piece(parameter, self.world)
        return start, piece

    def model_state(self, module: nn.Module) -> dict[str, Shard]:
        """Return this rank's part of a module's weights, and on rank 0 its buffers, by name."""
        found: dict[int, Shard] = {}
        swaps = self.groups.swaps
        for parameter, start, piece in self.pieces(module):
            # A clone outlives the buffer; in memory a view is enough, and a save reads it before the next step.
            tensor = piece.clone() if swaps else piece
            found[id(parameter)] = Shard.flat(tensor, full_shape(parameter), start)
        state: dict[str, Shard] = {}
        for name, tensor in state_tensors(module).items():
            if id(tensor) in found:
                state[name] = found[id(tensor)]
            elif isinstance(tensor, nn.Parameter) or self.world.rank == 0:
                # Buffers may differ between ranks. Those of one rank are consistent with each other.
                state[name] = Shard.whole(tensor.detach())
        return state

    def optimizer_state(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, Slots]]:
        if self.lent is not None:
            self.lent.take_back()
        scalars, _ = self.scalars_and_dtypes()
        for number, pieces in enumerate(self.groups.groups):
            with self.groups.opened(number) as (flat, slots):
                if not slots:
                    continue
                swapped = self.groups.swapped(number)
                for piece in pieces:
                    own = scalars[id(piece.parameter)]
                    if own is not None:
                        found = {**{slot: value for slot, value in slots.items() if is_flat(value)}, **own}
                        yield (
                            piece.parameter,
                            {slot: saved_slot(slot, value, flat, piece, swapped) for slot, value in found.items()},
                        )

    def scalars_and_dtypes(self) -> tuple[dict[int, Scalars | None], list[dict[str, torch.dtype]]]:
        """Return what each parameter's state has apart from ranges of flat tensors, and those by group. Collective.

        Returns:
            The scalars of each parameter by ``id``, None if it has no state, and the dtype of the flat tensors of each
            group by slot.
        """
        mine: list[tuple[dict[str, torch.dtype], dict[int, Any]]] = []
        for number, pieces in enumerate(self.groups.groups):
            state = self.groups.inner.state.get(self.groups.flats[number]) or {}
            known = shared_scalars(state)
            # Pickled once, however many parameters have it.
            shared = as_sent(known)
            own = {place: shared for place, piece in enumerate(pieces) if piece.length}
            if self.partial_steps is not None:
                own = {place: as_sent(self.partial_steps.scalars_of(pieces[place].parameter, known)) for place in own}
            mine.append(({slot: one.dtype for slot, one in state.items() if is_flat(one)}, own))
        found: dict[int, Scalars | None] = {}
        flat: list[dict[str, torch.dtype]] = []
        for pieces, sent in zip(self.groups.groups, zip(*self.world.all_gather_object(mine), strict=True), strict=True):
            own = {place: scalars for _, held in sent for place, scalars in held.items()}
            flat.append({slot: dtype for slots, _ in sent for slot, dtype in slots.items()})
            found |= {id(piece.parameter): own.get(place) for place, piece in enumerate(pieces)}
        return found, flat

    def stepping_optimizer(self, optimizer: Optimizer) -> Optimizer | None:
        """Return the optimizer that DeepSpeed steps."""
        inner: Optimizer | None = self.groups.inner
        return inner

    # ---- loading --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_model_state(self, module: nn.Module, tensors: StoredTensors) -> None:
        stored: dict[int, StoredTensor] = {}
        own = state_tensors(module)
        for name, one in tensors.items():
            # Tied parameters have several names and one value.
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
            self.groups.update_parameters()
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
        else:
            write_piece(tensor, stored.read_flat(start, length))

    @torch.no_grad()
    def load_optimizer_state(self, optimizer: Optimizer, state: Sequence[Slots], groups: list[dict[str, Any]]) -> None:
        """Load moments, step counters and hyperparameters. Collective."""
        if self.lent is not None:
            self.lent.forget()
        for group, stored in zip(optimizer.param_groups, groups, strict=True):
            group.update(stored)
        slots = {id(one): found for one, found in zip(parameters_of(optimizer), state, strict=True)}
        inner = self.groups.inner
        for number, pieces in enumerate(self.groups.groups):
            theirs = [(piece, slots.get(id(piece.parameter), {})) for piece in pieces]
            with self.groups.opened(number, write=True) as (flat, own):
                key = self.groups.flats[number]
                self._load_scalars(number, theirs)
                fresh = filled_slots(theirs, flat, own, inner)
                if fresh:
                    inner.state[key] = fresh
                else:
                    inner.state.pop(key, None)

    def _load_scalars(self, number: int, theirs: Sequence[tuple[Piece, Slots]]) -> None:
        """Load the scalars of a group's parameters one by one, if they differ or the group steps on pieces already."""
        found = [(piece, scalars_in(slots, piece.parameter)) for piece, slots in theirs]
        if self.partial_steps is not None or not all(are_equal(one, found[0][1]) for _, one in found):
            for piece, scalars in found:
                self._set_scalars(piece, scalars, self.groups.flats[number])

    def _set_scalars(self, piece: Piece, scalars: Scalars | None, flat: Tensor) -> None:
        if scalars is not None and scalars.get("step") is not None:
            scalars = {**scalars, "step": step_counter(float(scalars["step"]), flat, self.groups.inner)}
        self._stepping_on_pieces().load(piece.parameter, scalars)

    # ---- state that user code reads and writes --------------------------------------------------------------------

    def full_slots(self, number: int, piece: Piece, flat_slots: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Return the full tensors of a parameter's state. Collective.

        Args:
            number: the parameter's group.
            piece: this rank's piece of it.
            flat_slots: the slots of the group and their dtypes; this rank may lack some.
        """
        full, shape = {}, full_shape(piece.parameter)
        with self.groups.opened(number) as (_, own):
            for slot, dtype in flat_slots.items():
                mine = own[slot].narrow(0, piece.offset, piece.length) if slot in own else torch.empty(0)
                full[slot] = assembled(Shard.flat(mine, shape, piece.start), shape, dtype, self.world)
        return full

    @torch.no_grad()
    def write_slots(self, given: Mapping[int, Slots]) -> None:
        """Replace the state of some parameters, by ``id``, with full tensors; those with no slots have no state."""
        inner = self.groups.inner
        for number, pieces in enumerate(self.groups.groups):
            for piece in pieces:
                # On all ranks, also those without elements of the parameter: others would wait for the one that fails.
                _check_shapes(piece.parameter, given.get(id(piece.parameter), {}))
            theirs = [piece for piece in pieces if piece.length and id(piece.parameter) in given]
            key = self.groups.flats[number]
            if not theirs:
                continue
            with self.groups.opened(number, write=True) as (flat, own):
                for piece in theirs:
                    slots = given[id(piece.parameter)]
                    known = shared_scalars(inner.state.get(key))
                    if self.partial_steps is not None:
                        known = self.partial_steps.scalars_of(piece.parameter, known)
                    scalars = scalars_in(slots, piece.parameter)
                    if not are_equal(scalars, known):
                        self._stepping_on_pieces().settle(number)
                        self._set_scalars(piece, scalars, key)
                    if slots and not own:
                        # Where the group steps as a whole, these are those of all its parameters.
                        assert self.partial_steps is not None
                        own = inner.state[key] = dict(self.partial_steps.scalars_of(piece.parameter, None) or {})
                    for slot, value in slots.items():
                        if slot not in (scalars or ()):
                            self._write_slot(own, slot, value, flat, piece)

    @staticmethod
    def _write_slot(own: dict[str, Any], slot: str, value: Tensor, flat: Tensor, piece: Piece) -> None:
        if slot not in own:
            own[slot] = torch.zeros_like(flat, dtype=flat.dtype if value.is_floating_point() else value.dtype)
        mine = own[slot].narrow(0, piece.offset, piece.length)
        new = value.detach().reshape(-1).narrow(0, piece.start, piece.length).to(mine)
        # A save that is being copied depends on tensors that were only read.
        if not torch.equal(mine, new):
            mine.copy_(new)


def _check_shapes(parameter: Tensor, slots: Slots) -> None:
    """Refuse state of a parameter with other shapes, which the engine cannot divide as it does the parameter."""
    scalars = scalars_in(slots, parameter) or {}
    for slot, value in slots.items():
        if isinstance(value, Tensor) and slot not in scalars and tuple(value.shape) != tuple(full_shape(parameter)):
            raise ConfigurationError(
                f"optimizer.state has a tensor of {tuple(value.shape)} in {slot!r} of a parameter of "
                f"{tuple(full_shape(parameter))}, and DeepSpeed's engine divides state as it does parameters: give a "
                "tensor of that shape or a number, or keep it elsewhere."
            )
