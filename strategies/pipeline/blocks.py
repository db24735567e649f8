"""The blocks of a model that a pipeline divides, and the tensors that each stage holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ...framework.core.errors import ConfigurationError
from ...framework.core.wording import counted
from ...framework.parallel.blocks import repeated_blocks
from .schedules import Place


@dataclass(frozen=True)
class Stages:
    """The division of a model into stages."""

    blocks: list[nn.Module]
    """The blocks, in the order of their calls."""
    bounds: list[tuple[int, int]]
    """The first block of each stage, and the first one after it."""

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.bounds)

    def stage_of(self, block: int) -> int:
        """Return the stage that computes a block."""
        return next(stage for stage, (first, end) in enumerate(self.bounds) if first <= block < end)

    def homes(self, module: nn.Module) -> dict[int, int | None]:
        """Map the ``id`` of each parameter and buffer to its only stage; None for one that all ranks hold.

        These are the tensors outside the blocks, and those that blocks of several stages share.
        """
        stages: dict[int, set[int]] = {}
        for number, block in enumerate(self.blocks):
            for tensor in tensors_of_all(block):
                stages.setdefault(id(tensor), set()).add(self.stage_of(number))
        outside = {id(tensor) for tensor in _tensors_outside(module, set(self.blocks))}
        return {
            id(tensor): min(found) if len(found := stages.get(id(tensor), set())) == 1 and id(tensor) not in outside
            else None
            for tensor in tensors_of_all(module)
        }  # fmt: skip

    def owners(self, module: nn.Module, place: Place) -> dict[int, int | None]:
        """Map the ``id`` of each parameter and buffer to the only rank of a pipeline that holds it; None if all do."""
        return {key: None if home is None else place.rank_of(home) for key, home in self.homes(module).items()}


def tensors_of_all(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module, each once."""
    return [*module.parameters(), *module.buffers()]


def _tensors_outside(module: nn.Module, blocks: set[nn.Module]) -> list[Tensor]:
    """Return the tensors that parts other than the blocks hold."""
    found = [tensor for table in (module._parameters, module._buffers) for tensor in table.values()]
    for child in module.children():
        if child not in blocks:
            found += _tensors_outside(child, blocks)
    return [tensor for tensor in found if tensor is not None]


def find_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks to divide: those of ``configure_pipeline``, else the largest group of repeated blocks.

    Raises:
        ConfigurationError: ``configure_pipeline`` returned something else than modules of this module.
    """
    given = getattr(module, "configure_pipeline", None)
    chosen: Any = given() if callable(given) else None
    if chosen is not None:
        return _checked(module, chosen)
    parents = {id(child): id(parent) for parent in module.modules() for child in parent.children()}
    groups: dict[tuple[int, type], list[nn.Module]] = {}
    for block in repeated_blocks(module):
        groups.setdefault((parents[id(block)], type(block)), []).append(block)

    def size(blocks: list[nn.Module]) -> int:
        return sum(parameter.numel() for block in blocks for parameter in block.parameters())

    return max(groups.values(), key=size, default=[])


def _checked(module: nn.Module, chosen: Any) -> list[nn.Module]:
    blocks = list(chosen) if isinstance(chosen, (Sequence, nn.ModuleList, nn.Sequential)) else []
    parts = set(module.modules())
    if not blocks or not all(isinstance(block, nn.Module) and block in parts for block in blocks):
        raise ConfigurationError(
            f"{type(module).__name__}.configure_pipeline returned {type(chosen).__name__}: return the list of the "
            "blocks to divide, in the order in which they are called, such as self.model.layers."
        )
    return blocks


def divide(module: nn.Module, stages: int, argument: str) -> Stages:
    """Divide the blocks of a module evenly; the first and the last stage get one less where they do not divide.

    ``argument`` gives the number of stages, for the message.

    Raises:
        ConfigurationError: there are fewer blocks than stages.
    """
    blocks = find_blocks(module)
    name = type(module).__name__
    if len(blocks) < 2:
        raise ConfigurationError(
            f"{name} has no list of repeated blocks to divide over a pipeline: define configure_pipeline in the "
            "module, which returns its blocks in the order of their calls, or leave pp out."
        )
    if len(blocks) < stages:
        fitting = [str(count) for count in range(2, len(blocks) + 1)]
        raise ConfigurationError(
            f"{argument} makes {counted(stages, 'stage')}, and {name} has {counted(len(blocks), 'block')} to divide: "
            f"use {', '.join(fitting)} stages, or another strategy."
        )
    base, rest = divmod(len(blocks), stages)
    sizes = [base] * stages
    for stage in sorted(range(stages), key=lambda each: (each == stages - 1, each == 0))[:rest]:
        sizes[stage] += 1
    bounds, first = [], 0
    for size in sizes:
        bounds.append((first, first + size))
        first += size
    return Stages(blocks, bounds)
