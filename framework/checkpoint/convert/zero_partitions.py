"""ZeRO's flat partitions of all ranks, joined and cut into parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from .unpickle_client import Content

Shapes = Mapping[str, Sequence[int]]


@dataclass
class Engine:
    """Files of DeepSpeed: model states by rank, and optimizer states by rank (empty without ZeRO)."""

    folder: Path
    models: list[Content]
    partitions: list[Mapping[str, Any]]

    @property
    def first(self) -> Content:
        """Rank 0's model states, where the client state is."""
        return self.models[0]


@dataclass
class FlatPartition:
    """One rank's flat tensors: by slot (the empty one is the weights), for each of its groups; and its scalars."""

    slots: list[dict[str, Tensor]]
    scalars: list[dict[str, Any]]

    @classmethod
    def of(cls, weights: Sequence[Tensor], base: Mapping[str, Any]) -> FlatPartition:
        """Take apart one rank's weights and the state that its optimizer has of them."""
        slots: list[dict[str, Tensor]] = []
        scalars: list[dict[str, Any]] = []
        for number, flat in enumerate(weights):
            state = base["state"].get(number, {})
            slots.append({"": flat.reshape(-1).float()})
            slots[-1].update({k: v.reshape(-1) for k, v in state.items() if isinstance(v, Tensor) and v.dim()})
            scalars.append({k: v for k, v in state.items() if not (isinstance(v, Tensor) and v.dim())})
        return cls(slots, scalars)


Cut = dict[str, dict[str, Any]]


def cut_stage_2(engine: Engine, flats: Sequence[FlatPartition], number: int, groups: Sequence[Shapes]) -> Cut:
    """Cut stages 1 and 2: each rank holds a contiguous part of the group's parameters, one after the other."""
    found: Cut = {}
    mappings: list[Any] = [partition.get("param_slice_mappings") for partition in engine.partitions]
    paddings = engine.partitions[0].get("param_alignment_paddings")
    offset = 0
    for place, (name, shape) in enumerate(groups[number].items()):
        slots = found.setdefault(name, dict(flats[0].scalars[number]))
        for slot in flats[0].slots[number]:
            if all(mappings):
                # Each rank tells which piece of its part is of which parameter, whatever the order.
                pieces = [
                    flat.slots[number][slot].narrow(0, where["start"], where["numel"])
                    for flat, mapping in zip(flats, mappings, strict=True)
                    if (where := mapping[number].get(name)) is not None
                ]
                slots[slot] = cut(_joined(pieces, engine), 0, shape, name, engine.folder)
            else:
                whole = _joined([flat.slots[number][slot] for flat in flats], engine)
                slots[slot] = cut(whole, offset, shape, name, engine.folder)
        offset += prod(shape) + (paddings[number][place] if paddings else 0)
    return found


def cut_stage_3(engine: Engine, flats: Sequence[FlatPartition], number: int, groups: Sequence[Shapes]) -> Cut:
    """Cut stage 3: each rank holds an equal, padded part of every parameter, one after the other."""
    ranks = len(flats)
    # Large groups are split into sub-groups, each with a state of its own; all count the same steps.
    first = engine.partitions[0]["optimizer_state_dict"]["param_groups"][number]["params"][0]
    found: Cut = {}
    joined = [
        {slot: _joined([part[slot] for part in flat.slots if slot in part], engine) for slot in flat.slots[0]}
        for flat in flats
    ]
    offset = sum(-(-prod(shape) // ranks) for shapes in groups[:number] for shape in shapes.values())
    for name, shape in groups[number].items():
        size = -(-prod(shape) // ranks)
        slots = found.setdefault(name, dict(flats[0].scalars[first]))
        for slot in joined[0]:
            pieces = [one[slot].narrow(0, offset, min(size, one[slot].numel() - offset)) for one in joined]
            slots[slot] = cut(_joined(pieces, engine), 0, shape, name, engine.folder)
        offset += size
    return found


def _joined(pieces: Sequence[Tensor], engine: Engine) -> Tensor:
    if not pieces:
        raise CheckpointError(f"{engine.folder} does not hold all pieces of its parameters.")
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def cut(flat: Tensor, offset: int, shape: Sequence[int], name: str, folder: Path) -> Tensor:
    """Return the tensor of ``shape`` that begins at ``offset`` of a flat one.

    Raises:
        CheckpointError: there are too few elements.
    """
    if flat.dim() != 1 or offset + prod(shape) > flat.numel():
        raise CheckpointError(f"{folder} holds too few elements of {name} ({flat.numel()} for {list(shape)}).")
    return flat.narrow(0, offset, prod(shape)).reshape(tuple(shape))
