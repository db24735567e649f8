"""Canonical state under DeepSpeed: saves this rank's pieces as shards, and loads them from stored tensors.

Nothing is gathered, because a piece of a flat tensor is a range of a flattened parameter:

- weights are read from the fp32 masters; loading writes the masters, and from these the parameters to compute with;
- moments are in the flat tensors of the optimizer's state;
- step counters are one for each flat tensor, of the type in which the optimizer counts.

Private to DeepSpeed, and checked with 0.19.8: ``ds_tensor.status``, ``nvme_swapper.swap_in``, ``all_gather`` and
``partition`` of parameters, and ``_lazy_init_hp_params_optimizer_state`` of the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ...framework.checkpoint.stored_tensor import HeldTensor, StoredTensor, StoredTensors
from ...framework.checkpoint.write_plan import Shard
from ...framework.core.errors import ConfigurationError
from ...framework.core.optimizer_config import parameters_of
from ...framework.distributed.world import World
from ...framework.parallel.canonical_state import CanonicalState, Slots, is_stored
from ...framework.parallel.parameter_names import state_tensors
from .pieces import FlatGroups, Piece, even_piece, full_shape, is_split, local_piece


class PartitionedState(CanonicalState):
    """State of modules whose parameters may be partitioned, without an engine."""

    def shapes(self, module: nn.Module) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every tensor in a module's canonical state, by name."""
        return {name: full_shape(tensor) for name, tensor in state_tensors(module).items()}


class EngineState(PartitionedState):
    """The state that an engine holds of a module.

    Args:
        exact: this rank's fp32 pieces of parameters that have no master, by ``id``.
    """

    def __init__(self, groups: FlatGroups, exact: dict[int, Tensor], world: World) -> None:
        self.groups = groups
        self.exact = exact
        self.world = world

    # ---- saving ---------------------------------------------------------------------------------------------------

    def pieces(self, module: nn.Module) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """Yield each parameter, the start of this rank's piece of it, and the piece; in the same order on all ranks.

        Parameters that are not trained and that every rank holds in full are left out. Use a piece before the next one
        is requested: it may be in a buffer that is reused.
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
            count = torch.Size(full_shape(parameter)).numel()
            return exact, even_piece(count, self.world)[0]
        return local_piece(self._in_memory(parameter), self.world) if is_split(parameter) else None

    @staticmethod
    def _in_memory(parameter: Any) -> Any:
        """Return a split parameter, after reading its piece from the disk if it lives there."""
        if parameter.ds_tensor.status.name == "NOT_AVAILABLE":
            parameter.nvme_swapper.swap_in([parameter], async_op=False)
        return parameter

    def model_state(self, module: nn.Module) -> dict[str, Shard]:
        """Return this rank's part of a module's weights, and on rank 0 its buffers, by name."""
        found: dict[int, Shard] = {}
        swaps = any(self.groups.swapped(number) for number in range(len(self.groups.groups)))
        for parameter, start, piece in self.pieces(module):
            # A clone outlives the buffer; in memory a view is enough, and saving copies it.
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
        """Yield each parameter that has state, and this rank's pieces of its slots."""
        for number, pieces in enumerate(self.groups.groups):
            with self.groups.opened(number) as (flat, slots):
                if not slots:
                    continue
                swapped = self.groups.swapped(number)
                for piece in pieces:
                    yield (
                        piece.parameter,
                        {slot: _saved_slot(slot, value, flat, piece, swapped) for slot, value in slots.items()},
                    )

    def stepping_optimizer(self, optimizer: Optimizer) -> Optimizer | None:
        """Return DeepSpeed's optimizer if it steps in this thread, else None."""
        return self.groups.stepping

    # ---- loading --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_model_state(self, module: nn.Module, tensors: StoredTensors) -> None:
        """Load weights and buffers. Tensors that ``tensors`` does not have stay unchanged. Collective."""
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
        elif tensor.ds_tensor.status.name == "NOT_AVAILABLE":
            # On a disk: DeepSpeed writes it there when it is split again.
            tensor.all_gather()
            tensor.data.copy_(stored.read())
            tensor.partition(has_been_updated=True)
        elif length:
            local_piece(tensor, self.world)[0].copy_(stored.read_flat(start, length))

    @torch.no_grad()
    def load_optimizer_state(self, optimizer: Optimizer, state: Sequence[Slots], groups: list[dict[str, Any]]) -> None:
        """Load moments, step counters and hyperparameters. Collective."""
        for group, stored in zip(optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in stored.items() if key != "params"})
        slots = {id(one): found for one, found in zip(parameters_of(optimizer), state, strict=True)}
        inner = self.groups.inner
        for number, pieces in enumerate(self.groups.groups):
            theirs = [(piece, slots.get(id(piece.parameter), {})) for piece in pieces]
            with self.groups.opened(number, write=True) as (flat, own):
                key = self.groups.flats[number]
                fresh = _filled_slots(theirs, flat, own, counts_in_ints(inner), reads_step_on_device(inner))
                if fresh:
                    inner.state[key] = fresh
                else:
                    inner.state.pop(key, None)
        # Stages 1 and 2 link each parameter to its range of the state, once, at the first step. These tensors are new.
        relink = getattr(self.groups.zero, "_lazy_init_hp_params_optimizer_state", None)
        if relink is not None and all(flat in inner.state for flat in self.groups.flats):
            self.groups.zero._hp_optimizer_states_linked = False
            relink()


def refuse_empty_state(module: nn.Module) -> list[RemovableHandle]:
    """Let ``state_dict`` raise while a parameter is sharded: it would hold tensors without elements.

    Returns:
        The handles of the hooks, one for each part of the module that has parameters.
    """
    owners = [part for part in module.modules() if part._parameters]
    return [part.register_state_dict_pre_hook(_check_full) for part in owners]


def _check_full(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if keep_vars:
        # The parameters themselves are asked for, by code that knows them to be sharded.
        return
    for name, parameter in module._parameters.items():
        if parameter is not None and is_split(parameter) and parameter.numel() < math.prod(full_shape(parameter)):
            raise ConfigurationError(
                f"state_dict() of {type(module).__name__} would hold '{prefix}{name}' without elements: the strategy "
                "shards parameters over the ranks: save the module itself, with fabric.save(path, {'model': model}) "
                "or fabric.save_model(model, directory), and in a Trainer with trainer.save_checkpoint(path)."
            )


def counts_in_ints(optimizer: Any) -> bool:
    """Whether an optimizer counts its steps in ints, as DeepSpeed's Adams do, and not in tensors as torch's."""
    return hasattr(optimizer, "adam_w_mode")


def reads_step_on_device(optimizer: Optimizer) -> bool:
    """Whether kernels of an optimizer of torch read its step counters, which must then be on their device."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _saved_slot(slot: str, value: Any, flat: Tensor, piece: Piece, swapped: bool) -> Any:
    """Return one parameter's value of a slot, as a checkpoint holds it."""
    if slot == "step":
        return torch.tensor(float(value), dtype=torch.float32)
    if isinstance(value, Tensor) and value.dim() and value.numel() == flat.numel():
        part = value.detach().narrow(0, piece.offset, piece.length)
        return Shard.flat(part.clone() if swapped else part, full_shape(piece.parameter), piece.start)
    return value


def _filled_slots(
    theirs: Sequence[tuple[Piece, Slots]], flat: Tensor, own: Mapping[str, Any], ints: bool, fused: bool
) -> dict[str, Any]:
    """Return the state of a flat group, filled with the pieces of its parameters.

    Args:
        theirs: the pieces of the group, each with the stored slots of its parameter.
        own: the state that the flat tensor has now, whose memory is reused.
        ints: whether the optimizer counts steps in ints.
        fused: whether its kernel reads the counter, which must then be on the device of the flat tensor.
    """
    filled: dict[str, Any] = {}
    steps = [float(slots["step"]) for _, slots in theirs if slots.get("step") is not None]
    if steps:
        # DeepSpeed has one counter for the group: a parameter that joined later counts as if it had always been there.
        on_device = fused and flat.device.type != "cpu"
        device = flat.device if on_device else torch.device("cpu")
        filled["step"] = int(max(steps)) if ints else torch.tensor(max(steps), dtype=torch.float32, device=device)
    for piece, slots in theirs:
        for slot, value in slots.items():
            if slot == "step" or value is None:
                continue
            if isinstance(value, Tensor) and not full_shape(piece.parameter):
                # A parameter without dims has moments without dims, which a checkpoint stores like numbers.
                value = HeldTensor(value)
            if not is_stored(value):
                filled.setdefault(slot, value)
                continue
            if slot not in filled:
                present: Any = own.get(slot)
                reusable = isinstance(present, Tensor) and present.numel() == flat.numel()
                filled[slot] = present.zero_() if reusable else torch.zeros_like(flat)
            if piece.length:
                filled[slot].narrow(0, piece.offset, piece.length).copy_(value.read_flat(piece.start, piece.length))
    return filled
