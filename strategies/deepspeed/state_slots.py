"""The slots of DeepSpeed's optimizers as checkpoints hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...framework.checkpoint.reader import HeldShard
from ...framework.checkpoint.write_plan import Shard
from ...framework.parallel.canonical_state import Slots, is_stored
from .flat_groups import Piece, full_shape

# Slots without dims of torch's optimizers.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})


def counts_in_ints(optimizer: Any) -> bool:
    """Whether an optimizer counts its steps in ints, as DeepSpeed's Adams do, and not in tensors as torch's."""
    return hasattr(optimizer, "adam_w_mode")


def saved_slot(slot: str, value: Any, flat: Tensor, piece: Piece, swapped: bool) -> Any:
    """Return one parameter's value of a slot, as a checkpoint holds it."""
    if slot == "step":
        return torch.tensor(float(value), dtype=torch.float32)
    if isinstance(value, Tensor) and value.dim() and value.numel() == flat.numel():
        part = value.detach().narrow(0, piece.offset, piece.length)
        return Shard.flat(part.clone() if swapped else part, full_shape(piece.parameter), piece.start)
    return value


def scalars_in(slots: Mapping[str, Any], parameter: Tensor) -> dict[str, Any] | None:
    """Return the slots of a parameter that have no value for each of its elements; None without any slots."""
    without_dims = not full_shape(parameter)
    found = {}
    for slot, value in slots.items():
        # A parameter without dims has moments without dims.
        is_moment = isinstance(value, Tensor) and (value.dim() > 0 or (without_dims and slot not in _SCALARS))
        if value is not None and not is_moment and not is_stored(value):
            found[slot] = value
    return found if slots else None


def as_sent(scalars: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a copy of scalars for other processes, which may have other devices."""
    if scalars is None:
        return None
    return {slot: one.to("cpu", copy=True) if isinstance(one, Tensor) else one for slot, one in scalars.items()}


def are_equal(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    """Whether two parameters have the same scalars, in whatever types."""
    if one is None or other is None:
        return one is other
    plain = [{slot: v.item() if isinstance(v, Tensor) else v for slot, v in each.items()} for each in (one, other)]
    return plain[0] == plain[1]


def step_counter(count: float, flat: Tensor, optimizer: Any) -> Any:
    """Return a step counter as an optimizer of DeepSpeed or torch counts, for its flat tensor."""
    if counts_in_ints(optimizer):
        return int(count)
    # Kernels of these forms read the counter on the device.
    reads = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return torch.tensor(count, dtype=torch.float32, device=flat.device if reads else "cpu")


def filled_slots(
    theirs: Sequence[tuple[Piece, Slots]], flat: Tensor, own: Mapping[str, Any], optimizer: Any
) -> dict[str, Any]:
    """Return the state of a flat group, filled with the pieces of its parameters.

    Args:
        theirs: the pieces of the group, each with the stored slots of its parameter.
        own: the state that the flat tensor has now, whose memory is reused.
        optimizer: the optimizer that steps the flat tensor.
    """
    filled: dict[str, Any] = {}
    steps = [float(slots["step"]) for _, slots in theirs if slots.get("step") is not None]
    if steps:
        # DeepSpeed has one counter for the group; `PartialSteps` has those of parameters that differ.
        filled["step"] = step_counter(max(steps), flat, optimizer)
    for piece, slots in theirs:
        for slot, value in slots.items():
            if slot == "step" or value is None:
                continue
            if isinstance(value, Tensor) and not full_shape(piece.parameter) and slot not in _SCALARS:
                # A parameter without dims has moments without dims, which a checkpoint stores like scalars.
                value = HeldShard(Shard.whole(value.detach()))
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
