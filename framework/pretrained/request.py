"""``PretrainedRequest``: pretrained weights that a module asks for before a strategy sets it up."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ..core.errors import ConfigurationError, unknown
from ..parallel.meta_device import tensors_of
from ..parallel.parameter_names import canonical_names, state_tensors
from ..parallel.supplied import has_supplied_values
from .transformers_models import initialize_missing, transformers_models, use_generation_config

Place = tuple[nn.Module, str]
"""The module that owns a tensor, and the tensor's key there."""

_MARK = "_phalanx_has_weights"
_AWAITS = "_phalanx_awaits_weights"


class Target:
    """The submodule that weights are loaded into, with its tensors' names at the time of the request.

    Tensors are found again by their places: layers may be wrapped afterwards, as adapters do, which changes names.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.places = places_of(module)

    def tied_among(self, names: Collection[str]) -> dict[str, str]:
        """Map each of these names to the first one of the same tensor."""
        first: dict[int, str] = {}
        return {name: first.setdefault(id(tensor_at(self.places[name])), name) for name in names}

    @property
    def is_loaded(self) -> bool:
        """Whether the layers, or their originals if they are copies, have the weights to continue with."""
        return bool(self.places) and all(_MARK in part.__dict__ for part, _ in self.places.values())

    def mark_loaded(self) -> None:
        """Record that the layers have the weights to continue with: later requests for them are not executed.

        Layers that replace them later are not marked.
        """
        for part, _ in self.places.values():
            # No ordinary way: layers are of any class. The mark is in their dict, so that copies have it too.
            part.__dict__[_MARK] = True

    def in_place(self, root: nn.Module) -> set[str]:
        """Return the names of the tensors that are still in the module ``root``."""
        now = set(places_of(root).values())
        return {name for name, place in self.places.items() if place in now}


@dataclass(frozen=True)
class PretrainedRequest:
    """The arguments of ``TrainModule.load_pretrained``."""

    path: str
    strict: bool | None
    into: str
    """The name of the submodule, or its class; empty if it was not given. For records."""
    target: Target | None
    """The submodule; if it was not given, the only model of transformers at that time, if there was one."""
    given: Mapping[str, Tensor] | None = None
    """The tensors of the target that have the values of the files since the call; None if none has."""
    changed: frozenset[str] = frozenset()
    """The names of those that the program has changed or replaced since: it has their values now."""

    def targets(self, root: nn.Module) -> list[Target]:
        """Return the submodules that the files may belong to; the first one is preferred.

        Without ``into`` they may also hold the whole module, as ``Trainer.export`` writes it.
        """
        if self.target is not None and (self.into or self.given is not None):
            return [self.target]
        first = self.target or _only_model(root)
        return [Target(root)] if first is None else [first, Target(root)]

    def mark_waiting(self, root: nn.Module) -> None:
        """Mark the layers whose weights are not there yet, by which copies of them are found."""
        target = self.targets(root)[0]
        for name, (part, _) in target.places.items():
            if self.given is None or (name in self.given and self.given[name].is_meta):
                # No ordinary way: as in ``Target.mark_loaded``.
                part.__dict__[_AWAITS] = True

    def settled(self, root: nn.Module) -> PretrainedRequest:
        """Return the request with the names that were changed since the call. Called in its ``SuppliedValues``.

        Raises:
            ConfigurationError: a tensor was replaced that had no values to copy, as it was on the meta device.
        """
        if self.target is None or self.given is None:
            return self
        kept = self.target.in_place(root)
        changed = set()
        for name, tensor in self.given.items():
            is_same = name in kept and tensor_at(self.target.places[name]) is tensor
            if not is_same and tensor.is_meta:
                raise ConfigurationError(
                    f"{name} was replaced after load_pretrained, and was on the meta device, where its values cannot "
                    "be copied: build the model on the CPU, without torch.device('meta')."
                )
            if not (is_same and (tensor.is_meta or has_supplied_values(tensor))):
                changed.add(name)
        return replace(self, given={}, changed=frozenset(changed))

    def use_generation_config(self) -> None:
        """Let the model generate with the settings of the folder; also where its weights come from a checkpoint.

        Raises:
            CheckpointError: the settings cannot be read.
        """
        if self.target is not None:
            use_generation_config(self.target.module, self.path)


def requested(
    root: nn.Module, path: str | os.PathLike[str], into: nn.Module | str | None, strict: bool | None
) -> PretrainedRequest:
    """Check the arguments of ``load_pretrained``, and return the request.

    Raises:
        ConfigurationError: ``path`` is not a path, ``strict`` not a bool, or ``into`` not a module or a name.
        UnknownNameError: there is no submodule with the name ``into``.
    """
    if not isinstance(path, str | os.PathLike):
        raise ConfigurationError(f"load_pretrained(path={path!r}): give the path of a folder or a file.")
    if strict is not None and not isinstance(strict, bool):
        raise ConfigurationError(f"load_pretrained(strict={strict!r}) must be True, False or None.")
    if isinstance(into, str):
        parts = dict(root.named_modules())
        if into not in parts:
            raise unknown("submodule", into, parts)
        return PretrainedRequest(os.fspath(path), strict, into, Target(parts[into]))
    if into is not None and not isinstance(into, nn.Module):
        raise ConfigurationError(
            f"load_pretrained(into={type(into).__name__}): give a submodule, or the name of one, such as 'net'."
        )
    if into is None:
        return PretrainedRequest(os.fspath(path), strict, "", _only_model(root))
    return PretrainedRequest(os.fspath(path), strict, type(into).__name__, Target(into))


def forget_waiting(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Remove the marks of layers whose weights were not there yet, and return those layers by path."""
    # No ordinary way: see ``Target.mark_loaded``.
    return [(path, part) for path, part in root.named_modules() if part.__dict__.pop(_AWAITS, False)]


def check_copies(root: nn.Module, requests: Collection[PretrainedRequest]) -> None:
    """Refuse copies of layers that were made before the layers had their weights.

    Raises:
        ConfigurationError: there is such a copy.
    """
    own = {id(part) for one in requests if one.target is not None for part, _ in one.target.places.values()}
    for path, part in forget_waiting(root):
        if id(part) not in own and any(one.target is not None for one in requests):
            raise ConfigurationError(
                f"{path} is a copy of a layer whose pretrained weights were not there yet: call load_pretrained in "
                "configure_model, on layers that are not on the meta device, and copy them after that line."
            )


def _only_model(root: nn.Module) -> Target | None:
    models = transformers_models(root)
    return Target(models[0]) if len(models) == 1 else None


def places_of(module: nn.Module) -> dict[str, Place]:
    """Return the place of each tensor in a module's state by canonical name; tied tensors have several."""
    canonical, own = canonical_names(module), state_tensors(module)
    return {canonical(name): (part, key) for name, part, key in _registrations(module) if name in own}


def tensor_at(place: Place) -> Tensor:
    """Return the tensor at a place."""
    part, key = place
    parameter = part._parameters.get(key)
    tensor = part._buffers[key] if parameter is None else parameter
    assert tensor is not None
    return tensor


def _registrations(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for path, part in module.named_modules(remove_duplicate=False):
        tables: tuple[Mapping[str, Tensor | None], ...] = (part._parameters, part._buffers)
        for table in tables:
            for key, tensor in table.items():
                if tensor is not None:
                    yield f"{path}.{key}" if path else key, part, key


def initialize_rest(module: nn.Module, empty: set[int], supplied: Collection[str] = ()) -> None:
    """Give models of transformers that were built on the meta device the values that are not loaded.

    Args:
        module: the module.
        empty: the ``id`` of each tensor without data, from ``empty_tensors``.
        supplied: canonical names of the tensors that are loaded.
    """
    canonical = canonical_names(module)
    lacking = {id(tensor) for name, tensor in tensors_of(module) if canonical(name) not in supplied} & empty
    for model in transformers_models(module):
        initialize_missing(model, lacking)
