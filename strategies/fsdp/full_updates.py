"""Updates of sharded parameters by optimizers that need each of them in full, such as Muon.

Every parameter has an owner among the ranks that hold its shards. Before a step each rank sends its shards of the
parameters and gradients to their owners, which update the full tensors with the user's own optimizer; then the owners
send the shards of the result back. Each rank computes its share of the updates, and holds the state of the parameters
that it owns.
An update sends the elements of these parameters three times; a rank holds its share of them twice more while it lasts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ...framework.checkpoint.write_plan import part_at
from ...framework.core.optimizer_config import parameters_of
from ...framework.distributed.world import World
from .local_shards import local_of, shape_and_offsets

_Place = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Owned:
    """A sharded parameter and the rank that updates it."""

    parameter: DTensor
    owner: int
    places: dict[int, _Place]
    """Shape and offsets of the shards, by rank, of those ranks that hold different ones."""


class FullUpdates:
    """Lets an optimizer update full parameters, each on one rank. Constructing it is collective.

    Args:
        optimizer: holds parameters that are sharded; state that it has already is full, on every rank.
    """

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        self._optimizer = optimizer
        self._world = world
        self._parameters = {id(one.parameter): one for one in _assigned(optimizer, world)}
        self._sharded: list[tuple[dict[str, Any], list[Tensor]]] = []
        self._full: list[tuple[Owned, Tensor]] = []
        self._live: list[Owned] = []
        for one in self._parameters.values():
            if not self.owns(one.parameter):
                optimizer.state.pop(one.parameter, None)
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def __contains__(self, parameter: Tensor) -> bool:
        return id(parameter) in self._parameters

    def owns(self, parameter: Tensor) -> bool:
        """Whether this rank updates a parameter and holds its state."""
        return self._parameters[id(parameter)].owner == self._world.rank

    # ---- a step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _before_step(self, *_: Any) -> None:
        """Give the optimizer the full parameters that this rank owns, with their gradients. Collective."""
        held = self._parameters.values()
        self._live = [one for one in held if one.parameter.grad is not None]
        whole = dict(self._gathered([local_of(one.parameter) for one in self._live]))
        gradients = dict(self._gathered([local_of(_gradient(one)) for one in self._live]))
        for one in self._live:
            if one.owner == self._world.rank:
                full = whole[id(one)]
                full.grad = gradients[id(one)]
                self._full.append((one, full))
        self._exchange_keys()

    def _exchange_keys(self) -> None:
        """Put the full parameters into the optimizer's groups, and their state under them."""
        full = {id(one.parameter): tensor for one, tensor in self._full}
        state = self._optimizer.state
        for group in self._optimizer.param_groups:
            sharded: list[Tensor] = group["params"]
            self._sharded.append((group, sharded))
            known = (full.get(id(parameter)) if parameter in self else parameter for parameter in sharded)
            group["params"] = [tensor for tensor in known if tensor is not None]
        for one, tensor in self._full:
            if one.parameter in state:
                state[tensor] = state.pop(one.parameter)

    @torch.no_grad()
    def _after_step(self, *_: Any) -> None:
        """Give every rank its shards of the updated parameters. Collective."""
        self.release_step()
        results = {id(one): tensor for one, tensor in self._full}
        self._full = []
        rank, world = self._world.rank, self._world
        for dtype in _dtypes([one.parameter for one in self._live]):
            live = [one for one in self._live if one.parameter.dtype == dtype]
            parts: list[list[Tensor]] = [[] for _ in range(world.size)]
            sizes = [0] * world.size
            for one in live:
                if one.owner == rank:
                    for peer, (shape, offsets) in one.places.items():
                        parts[peer].append(part_at(results[id(one)], shape, offsets))
                sizes[one.owner] += prod(one.places[rank][0])
            received = world.all_to_all(_flat(parts, live), sizes)
            taken = [0] * world.size
            for one in live:
                local = local_of(one.parameter)
                start, taken[one.owner] = taken[one.owner], taken[one.owner] + local.numel()
                local.copy_(received[one.owner][start : taken[one.owner]].view(local.shape))
        self._live = []

    def release_step(self) -> None:
        """Give the optimizer its sharded parameters again, also after a step that has failed."""
        state = self._optimizer.state
        for group, sharded in self._sharded:
            group["params"] = sharded
        self._sharded = []
        for one, tensor in self._full:
            if tensor in state:
                state[one.parameter] = state.pop(tensor)

    def _gathered(self, shards: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
        """Send this rank's shards, one for each of the live parameters, to the owners. Collective.

        Yields:
            The ``id`` of each live entry that this rank owns, and its full tensor.
        """
        rank, world = self._world.rank, self._world
        for dtype in _dtypes(shards):
            pairs = [(one, each) for one, each in zip(self._live, shards, strict=True) if each.dtype == dtype]
            parts: list[list[Tensor]] = [[] for _ in range(world.size)]
            sizes = [0] * world.size
            for one, local in pairs:
                parts[one.owner].append(local)
                if one.owner == rank:
                    for peer, (shape, _) in one.places.items():
                        sizes[peer] += prod(shape)
            received = world.all_to_all(_flat(parts, [one for one, _ in pairs]), sizes)
            taken = [0] * world.size
            for one, local in pairs:
                if one.owner != rank:
                    continue
                full = local.new_empty(one.parameter.shape)
                for peer, (shape, offsets) in one.places.items():
                    start, taken[peer] = taken[peer], taken[peer] + prod(shape)
                    part_at(full, shape, offsets).copy_(received[peer][start : taken[peer]].view(shape))
                yield id(one), full

    def release(self) -> None:
        """Remove the hooks; the optimizer holds its sharded parameters."""
        self.release_step()
        self._full, self._live = [], []
        for hook in self._hooks:
            hook.remove()


def _gradient(one: Owned) -> Tensor:
    gradient = one.parameter.grad
    assert gradient is not None
    return gradient


def _dtypes(tensors: Sequence[Tensor]) -> list[torch.dtype]:
    """Return the dtypes of tensors in the order of their first use, which is the same on all ranks."""
    return list(dict.fromkeys(tensor.dtype for tensor in tensors))


def _flat(parts: Sequence[Sequence[Tensor]], live: Sequence[Owned]) -> list[Tensor]:
    """Return the parts for each rank as one 1-d tensor."""
    empty = local_of(live[0].parameter).new_empty(0)
    return [torch.cat([part.reshape(-1) for part in each]) if each else empty for each in parts]


def _assigned(optimizer: Optimizer, world: World) -> list[Owned]:
    """Choose an owner for every sharded parameter, so that all ranks have about the same to compute. Collective."""
    parameters = [each for each in parameters_of(optimizer) if isinstance(each, DTensor)]
    places = world.all_gather_object([shape_and_offsets(parameter) for parameter in parameters])
    loads: dict[int, list[int]] = {}
    owners: dict[int, int] = {}
    order = sorted(range(len(parameters)), key=lambda number: -_cost(parameters[number]))
    for number in order:
        peers = _peers(parameters[number])
        # By position, as the peers of other replicas choose the owner with the same position.
        load = loads.setdefault(len(peers), [0] * len(peers))
        position = load.index(min(load))
        load[position] += _cost(parameters[number])
        owners[number] = peers[position]
    return [
        Owned(parameter, owners[number], {peer: places[peer][number] for peer in _peers(parameter)})
        for number, parameter in enumerate(parameters)
    ]


def _cost(parameter: Tensor) -> int:
    """Return the cost of an update up to a factor: products of a matrix with its square."""
    return parameter.numel() * min(parameter.shape)


def _peers(parameter: DTensor) -> list[int]:
    """Return the ranks that hold different shards of a parameter, this rank included."""
    ranks, own = parameter.device_mesh.mesh, parameter.device_mesh.get_coordinate()
    assert own is not None
    for dim in reversed(range(parameter.device_mesh.ndim)):
        if parameter.placements[dim].is_replicate():
            ranks = ranks.select(dim, own[dim])
    return [int(rank) for rank in ranks.flatten()]
