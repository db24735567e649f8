"""``LoadPlan``: the tensors to load into a module, compared with it before anything is changed, then read by slices.

Each rank reads the headers of the files, and later the bytes of its own part of each tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod

import torch
from torch import nn

from ..checkpoint.reader import StoredTensor
from ..core.errors import CheckpointError
from ..core.registry import STRATEGIES
from ..distributed.collective_errors import on_all_ranks, on_rank_zero
from ..distributed.world import World
from ..parallel.meta_device import fill_from_rank_zero
from ..parallel.strategy import Strategy
from ..parallel.supplied import is_supplying, supply
from ..state.module_state import Shapes, put_model, shapes_of
from ..state.state_matching import ModelMatch, SavedModel, listed, match_names, refuse
from .request import PretrainedRequest, Target, initialize_rest, places_of, tensor_at
from .transformers_models import (
    empty_tensors,
    is_optional,
    is_transformers_model,
    is_unneeded,
    names_in_model,
)
from .weight_folder import Weights, fingerprint_of, open_weights

_ADVICE = "Give weights of this architecture, or strict=False to load only what matches."
_RESIZE = (
    " To resize a layer, build it in the size of the files, and resize it in configure_model after load_pretrained."
)
_COMPARED_ELEMENTS = 1 << 20


@dataclass
class LoadPlan:
    """The tensors to load, by canonical name in the module."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """One name for each tensor, also if it is tied."""
    supplied: set[str] = field(default_factory=set)
    """All names of these tensors."""
    notes: list[str] = field(default_factory=list)
    """A sentence for each source with names that the other side lacks."""
    sources: list[dict[str, str]] = field(default_factory=list)
    """The path, the fingerprint of the headers and the submodule of each source, for checkpoints and logs."""
    targets: list[Target] = field(default_factory=list)

    def load(self, strategy: Strategy, module: nn.Module) -> None:
        """Read this rank's part of each tensor into a module that is set up. Collective.

        Raises:
            CheckpointError: a file was changed since it was opened, or cannot be read.
        """
        put_model(strategy, module, self.tensors)
        for target in self.targets:
            target.mark_loaded()


def plan_loading(
    strategy: Strategy, world: World, module: nn.Module, requests: Sequence[PretrainedRequest]
) -> LoadPlan:
    """Compare the requested weights with a module, which is not changed. Collective.

    Raises:
        CheckpointError: on all ranks; weights are missing, damaged or quantized, do not match the module, differ
            between ranks, or have different values for tensors that the module ties.
    """
    plan = LoadPlan()
    for request in requests:
        found = on_all_ranks(world, partial(_Matched.best, strategy, module, request))
        prints = world.all_gather_object(fingerprint_of(found.weights, contents=False))
        other = next((rank for rank, one in enumerate(prints) if one != prints[0]), None)
        if other is not None:
            raise CheckpointError(
                f"{found.weights.path} holds other weights on rank {other} than on rank 0: give a path that all "
                "machines share, or copy the same files to each."
            )
        on_rank_zero(world, found.check_ties)
        found.add_to(plan, prints[0])
    return plan


class _Matched:
    """The weights of a request, matched with a target."""

    def __init__(
        self,
        root: nn.Module,
        weights: Weights,
        target: Target,
        request: PretrainedRequest,
        shapes: Shapes,
    ) -> None:
        self.weights, self._target, self._request = weights, target, request
        at = {place: name for name, place in places_of(root).items()}
        self._in_root = {
            name: at[place] for name, place in target.places.items() if place in at and name not in request.changed
        }
        own = {name: shapes[full] for name, full in self._in_root.items()}
        self._saved = self._described()
        self._tied = target.tied_among(self._in_root)
        self.match: ModelMatch = match_names(own, self._saved, self._tied)

    @classmethod
    def best(cls, strategy: Strategy, root: nn.Module, request: PretrainedRequest) -> _Matched:
        """Open the weights, and match them with the target that has most of their names.

        Raises:
            CheckpointError: they cannot be read, or do not match.
        """
        weights, shapes = open_weights(request.path), shapes_of(strategy, root)
        found = [cls(root, weights, target, request, shapes) for target in request.targets(root)]
        chosen = max(found, key=lambda one: len(one.match.tensors))
        chosen._check()
        return chosen

    def _described(self) -> SavedModel:
        target, stored, own = self._target.module, self.weights.tensors, self._target.places
        names = {name: name for name in stored}
        if is_transformers_model(target):
            names = names_in_model(target, stored, own, self.weights.path)
            names = {new: old for new, old in names.items() if new in own or not is_unneeded(target, new)}
        names = {new: old for new, old in names.items() if new not in self._request.changed}
        aliases = self.weights.checkpoint.aliases("model") if self.weights.checkpoint is not None else {}
        new = {old: name for name, old in names.items()}
        owners = {name: new.get(aliases.get(old, old), name) for name, old in names.items()}
        return SavedModel({name: tuple(stored[old].shape) for name, old in names.items()}, names, owners)

    @property
    def _label(self) -> str:
        return type(self._target.module).__name__

    def _check(self) -> None:
        match, strict = self.match, self._request.strict
        path = self.weights.path
        if is_transformers_model(self._target.module):
            match.accept_missing([name for name in match.missing if is_optional(self._target.module, name)])
        elif strict is None:
            strict = True
        advice = _ADVICE + (_RESIZE if match.misshapen else "")
        if strict:
            refuse(path, self._label, self._problems(), advice)
        elif strict is None:
            refuse(path, self._label, self._problems(match.misshapen), advice)
        half = len(match.tensors) * 2
        if self._request.given is None and half < len(self.weights.tensors) and half < len(self._in_root):
            raise CheckpointError(
                f"{path} does not fit {self._label}: only {len(match.tensors)} of its {len(self.weights.tensors)} "
                f"tensors have a place among the {len(self._in_root)} of the module: {listed(self._problems())}. Give "
                "weights of this architecture."
            )
        for name, old in match.tensors.items():
            self._check_dtype(name, self.weights.tensors[old].dtype)

    def _problems(self, names: set[str] | None = None) -> list[str]:
        """Return the mismatches of these names; by default of all names that are not ignored."""
        chosen = {*self.match.missing, *self.match.extra, *self.match.misshapen} if names is None else names
        return [one for one in self.match.problems if one.partition(":")[0] in chosen]

    def _check_dtype(self, name: str, stored: torch.dtype) -> None:
        own = tensor_at(self._target.places[name]).dtype
        is_narrow = stored.itemsize == 1 and stored != own
        if stored.is_floating_point != own.is_floating_point or (is_narrow and own.is_floating_point):
            raise CheckpointError(
                f"{self.weights.path} holds {name} as {stored}, and the module as {own}, into which the values cannot "
                "be cast: give weights that are not quantized."
            )

    def check_ties(self) -> None:
        """Check that tensors that the module ties have the same values, if the files hold several of them.

        Raises:
            CheckpointError: they differ.
        """
        first: dict[str, str] = {}
        for name, old in self.match.tensors.items():
            other = first.setdefault(self._tied[name], name)
            if other != name and not _are_equal(
                self.weights.tensors[self.match.tensors[other]], self.weights.tensors[old]
            ):
                raise CheckpointError(
                    f"{self.weights.path} holds different values for {other} and {name}, which are one tensor in "
                    f"{self._label}: build the model with untied layers (tie_word_embeddings=False in its config)."
                )

    def arriving(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the first name of each tensor that gets values, and its values."""
        sources = {self._tied[name]: old for name, old in reversed(self.match.tensors.items())}
        for name in self._in_root:
            if name in sources:
                yield name, self.weights.tensors[sources[name]]

    def give(self) -> PretrainedRequest:
        """Supply the tensors that match with their values, and return the request with them and this target."""
        given = {name: tensor_at(self._target.places[name]) for name, _ in self.arriving()}
        for name, stored in self.arriving():
            supply(given[name], stored.read)
        every = {name: tensor_at(self._target.places[name]) for name in self._in_root}
        ids = set(map(id, given.values()))
        return replace(
            self._request,
            target=self._target,
            given={name: tensor for name, tensor in every.items() if id(tensor) in ids},
        )

    def add_to(self, plan: LoadPlan, headers: str) -> None:
        """Add the tensors that match, and what is to be reported, to a plan."""
        plan.tensors.update((self._in_root[name], stored) for name, stored in self.arriving())
        plan.supplied |= {
            self._in_root[name] for name, first in self._tied.items() if self._in_root[first] in plan.tensors
        }
        plan.targets.append(self._target)
        plan.sources.append({"path": str(self.weights.path), "headers": headers, "into": self._request.into})
        if problems := self._problems():
            plan.notes.append(
                f"{self._label} keeps its initial values where {self.weights.path} differs from it: {listed(problems)}."
            )


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare two stored tensors, a few megabytes at a time."""
    total = prod(one.shape)
    return tuple(one.shape) == tuple(other.shape) and all(
        torch.equal(one.read_flat(start, size), other.read_flat(start, size))
        for start in range(0, total, _COMPARED_ELEMENTS)
        for size in (min(_COMPARED_ELEMENTS, total - start),)
    )


def given_at_once(module: nn.Module, request: PretrainedRequest) -> PretrainedRequest:
    """Let the next lines of ``configure_model`` find the weights that a module asks for, in ``SuppliedValues``.

    They are read where a line needs them; the others are loaded when the strategy has set the module up. Weights that
    do not match the layers built so far are compared again then, on all ranks.
    """
    if any(target.is_loaded for target in request.targets(module)):
        return request
    if is_supplying():
        with suppress(CheckpointError):
            request = _Matched.best(STRATEGIES.load("single")(), module, request).give()
    request.mark_waiting(module)
    return request


def load_into(
    strategy: Strategy, world: World, module: nn.Module, request: PretrainedRequest, stacklevel: int
) -> list[dict[str, str]]:
    """Load weights into a module that is set up, and warn of names that only one side has. Collective.

    Returns:
        The path and the fingerprint of the headers.

    Raises:
        CheckpointError: on all ranks; see ``plan_loading``.
    """
    plan = plan_loading(strategy, world, module, [request])
    on_all_ranks(world, request.use_generation_config)
    plan.load(strategy, module)
    if plan.notes and world.is_global_zero:
        warnings.warn(" ".join(plan.notes), stacklevel=stacklevel + 1)
    return plan.sources


def load_alone(module: nn.Module, requests: Sequence[PretrainedRequest]) -> None:
    """Load weights into a module of this process alone, which no strategy has set up.

    Raises:
        CheckpointError: see ``plan_loading``.
    """
    strategy, world, empty = STRATEGIES.load("single")(), World.single(torch.device("cpu")), empty_tensors(module)
    plan = plan_loading(strategy, world, module, requests)
    initialize_rest(module, empty, plan.supplied)
    fill_from_rank_zero(module, world, plan.supplied)
    plan.load(strategy, module)
