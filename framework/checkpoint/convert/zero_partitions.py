"""ZeRO's flat partitions of all ranks, joined and cut into named parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from .foreign_state import ForeignOptimizer, Group

Shapes = Mapping[str, Sequence[int]]


@dataclass
class Engine:
    """Files of DeepSpeed: model states by rank, and optimizer states by rank (empty without ZeRO)."""

    folder: Path
    models: list[dict[str, Any]]
    partitions: list[Mapping[str, Any]]

    @property
    def first(self) -> dict[str, Any]:
        """Rank 0's model states, where the client state is."""
        return self.models[0]

    @property
    def stage(self) -> int:
        """The stage of ZeRO."""
        return int(self.partitions[0].get("zero_stage", 0)) if self.partitions else 0


def parameters(engine: Engine, named: Callable[[str], str]) -> tuple[dict[str, Tensor], ForeignOptimizer]:
    """Return fp32 weights and the optimizer's state by name.

    Raises:
        CheckpointError: the partitions have another form, or too few elements.
    """
    groups: list[Shapes] = engine.first["param_shapes"]
    if isinstance(groups, dict):
        groups = [groups]
    key, inner = "single_partition_of_fp32_groups", "base_optimizer_state"
    if engine.stage == 3:
        key, inner = "fp32_flat_groups", "optimizer_state_dict"
    bases: list[Any] = [partition.get(inner) for partition in engine.partitions]
    if not all(isinstance(base, dict) and "state" in base for base in bases) or key not in engine.partitions[0]:
        raise CheckpointError(
            f"{engine.folder} holds ZeRO states in a form that is not converted (elastic or universal checkpoints): "
            "save once more without load_from_fp32_weights and elastic_checkpoint."
        )
    ranks = [(partition[key], base["state"]) for partition, base in zip(engine.partitions, bases, strict=True)]
    hyper = bases[0]["param_groups"]
    paddings = engine.partitions[0].get("param_alignment_paddings")
    masters: dict[str, Tensor] = {}
    optimizer = ForeignOptimizer([], {})
    offset = 0
    for number, shapes in enumerate(groups):
        if engine.stage == 3:
            # Each rank holds an equal, padded part of every parameter, one after the other through all groups, which
            # are split further for the optimizer.
            rows = _rows([_flat(*rank, range(len(rank[0]))) for rank in ranks])
            first = hyper[number]["params"][0]
        else:
            # Each rank holds a contiguous part of the group's parameters.
            rows = {slot: [_joined(row)] for slot, row in _rows([_flat(*rank, [number]) for rank in ranks]).items()}
            first, offset = number, 0
        scalars = {slot: value for slot, value in ranks[0][1].get(first, {}).items() if not _is_flat(value)}
        for place, (given, shape) in enumerate(shapes.items()):
            name = named(given)
            size = -(-prod(shape) // len(rows[""]))
            slots = {
                slot: cut(_joined([flat[offset : offset + size] for flat in row]), shape, name, engine.folder)
                for slot, row in rows.items()
            }
            masters[name] = slots.pop("")
            if slots or scalars:
                optimizer.state[name] = {**scalars, **slots}
            offset += size + (paddings[number][place] if paddings else 0)
        described = {key: value for key, value in hyper[number].items() if key not in ("params", "param_names")}
        optimizer.groups.append(Group([named(name) for name in shapes], described))
    return masters, optimizer


def _is_flat(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _flat(weights: Sequence[Tensor], state: Mapping[int, Any], groups: Sequence[int]) -> dict[str, Tensor]:
    """Return one rank's flat tensors of some groups by slot; the empty slot is the weights."""
    found = {"": [weights[number].float() for number in groups]}
    for number in groups:
        for slot, value in state.get(number, {}).items():
            if _is_flat(value):
                found.setdefault(slot, []).append(value)
    return {slot: _joined([piece.reshape(-1) for piece in pieces]) for slot, pieces in found.items()}


def _rows(ranks: Sequence[dict[str, Tensor]]) -> dict[str, list[Tensor]]:
    return {slot: [rank[slot] for rank in ranks] for slot in ranks[0]}


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def cut(flat: Tensor, shape: Sequence[int], name: str, folder: Path) -> Tensor:
    """Return the tensor of ``shape`` at the beginning of a flat one.

    Raises:
        CheckpointError: there are too few elements.
    """
    if flat.dim() != 1 or prod(shape) > flat.numel():
        raise CheckpointError(f"{folder} holds too few elements of {name} ({flat.numel()} for {list(shape)}).")
    return flat[: prod(shape)].reshape(tuple(shape))
