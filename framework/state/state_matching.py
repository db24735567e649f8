"""Compare a checkpoint with the live module and optimizers, and list every mismatch before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoint.reader import Checkpoint
from ..core.errors import CheckpointError, did_you_mean
from ..core.optimizer_config import parameters_of
from ..parallel.parameter_names import begins, renamed, tied_names

Shape = tuple[int, ...]

_MAX_SHOWN = 20


@dataclass
class SavedModel:
    """A model in a checkpoint, by the new names of its tensors: shapes, saved names, and the owners of tied names."""

    shapes: dict[str, Shape]
    names: dict[str, str]
    owners: dict[str, str]
    unused: list[str] = field(default_factory=list)
    """Names in ``renames`` that do not exist in the checkpoint."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, renames: Mapping[str, str], prefix: str = "") -> SavedModel:
        """Describe the tensors whose new names begin with ``prefix``, without that prefix."""
        every = renamed(checkpoint.names("model"), renames)
        names = {name[len(prefix) :]: old for name, old in every.items() if name.startswith(prefix)}
        aliases = checkpoint.aliases("model")
        new = {old: name for name, old in names.items()}
        owners = {name: new.get(aliases.get(old, old), name) for name, old in names.items()}
        shapes = {name: tuple(checkpoint.shape("model", old)) for name, old in names.items()}
        unused = [old for old in renames if not any(begins(name, old.rstrip(".")) for name in every.values())]
        return cls(shapes, names, owners, unused)

    @classmethod
    def held(cls, tensors: Mapping[str, Tensor]) -> SavedModel:
        """Describe tensors in memory."""
        names = {name: name for name in tensors}
        return cls({name: tuple(tensor.shape) for name, tensor in tensors.items()}, names, names)


@dataclass
class ModelMatch:
    """The match of a checkpoint and a module: the saved name of each of the module's tensors; and the mismatches."""

    tensors: dict[str, str] = field(default_factory=dict)
    misshapen: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    """The module's names that the checkpoint lacks."""
    extra: list[str] = field(default_factory=list)
    """The checkpoint's names that the module lacks."""
    problems: list[str] = field(default_factory=list)

    def accept_missing(self, names: Collection[str]) -> None:
        """Accept that the checkpoint lacks these names."""
        self.missing = [name for name in self.missing if name not in names]


def match_model(module: nn.Module, own: Mapping[str, Shape], saved: SavedModel) -> ModelMatch:
    """Compare names and shapes of a module, ``own``, with those of a checkpoint.

    A name that is missing on one side is accepted if its tensor is available under a name that it is tied to.
    """
    return match_names(own, saved, tied_names(module))


def match_names(own: Mapping[str, Shape], saved: SavedModel, tied: Mapping[str, str]) -> ModelMatch:
    """Do the work of ``match_model``; ``tied`` maps each name of a module to the first name of its tensor."""
    match, shapes = ModelMatch(), saved.shapes
    for name, shape in own.items():
        if shapes.get(name) == shape:
            match.tensors[name] = saved.names[name]
        elif name in shapes:
            match.misshapen.add(name)
            match.problems.append(f"{name}: {shapes[name]} in the checkpoint, {shape} in the module")
    arrives = {tied[name] for name in own if name in shapes}
    match.missing = missing = [name for name in own if name not in shapes and tied[name] not in arrives]
    taken = {saved.owners[name] for name in own if name in shapes}
    match.extra = extra = [name for name in shapes if name not in own and saved.owners[name] not in taken]
    match.problems += [f"{name}: missing in the checkpoint{_guess(name, extra or shapes)}" for name in missing]
    match.problems += [f"{name}: unknown to the module{_guess(name, missing or own)}" for name in extra]
    if match.problems:
        # A checkpoint saved under the new names does not need renames; one that does not match may need a missing one.
        match.problems += [f"renaming {old!r}: no name in the checkpoint begins with it" for old in saved.unused]
    return match


@dataclass
class OptimizerMatch:
    """The saved name of each of an optimizer's parameters, by position; and the mismatches.

    ``carries_groups``: whether the groups on both sides correspond, so that hyperparameters can be loaded.
    """

    parameters: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    carries_groups: bool = True


def group_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of the parameters of each group; parameters of unknown modules are numbered."""
    positions = {id(parameter): position for position, parameter in enumerate(parameters_of(optimizer))}
    return [
        [names.get(id(parameter), f"unnamed.{positions[id(parameter)]}") for parameter in group["params"]]
        for group in optimizer.param_groups
    ]


def match_optimizer(
    label: str,
    kind: str,
    own: Sequence[Sequence[str]],
    saved: Mapping[str, Any],
    renames: Mapping[str, str],
    misshapen: Container[str] = (),
) -> OptimizerMatch:
    """Compare an optimizer of the class ``kind`` and the groups ``own`` with one that a checkpoint describes.

    The state of ``misshapen`` parameters does not match either.
    """
    # A converted checkpoint may not know the class: the name is then empty.
    if saved["class"] and kind != saved["class"]:
        return OptimizerMatch({}, [f"{label}: {saved['class']} in the checkpoint, {kind} here"], carries_groups=False)
    match = OptimizerMatch()
    if len(own) != len(saved["groups"]):
        match.problems.append(f"{label}: {len(saved['groups'])} parameter groups in the checkpoint, {len(own)} here")
        match.carries_groups = False
    old = renamed((name for group in saved["groups"] for name in group["params"]), renames)
    groups = {name: number for number, group in enumerate(saved["groups"]) for name in group["params"]}
    here = {name: number for number, group in enumerate(own) for name in group}
    _match_names(match, label, here, old, misshapen)
    for name, saved_name in old.items():
        if match.carries_groups and name in here and here[name] != groups[saved_name]:
            places = f"group {groups[saved_name]} in the checkpoint, group {here[name]} here"
            match.problems.append(f"{label}: {name} is in {places}")
    return match


def _match_names(
    match: OptimizerMatch, label: str, here: Mapping[str, int], old: Mapping[str, str], misshapen: Container[str]
) -> None:
    """Match parameters by name, and list parameters that only one side has."""
    for position, name in enumerate(here):
        if name not in old:
            match.problems.append(f"{label}: {name} is in its groups here, not in the checkpoint{_guess(name, old)}")
        elif name not in misshapen:
            match.parameters[position] = old[name]
    for name in old:
        if name not in here:
            match.problems.append(f"{label}: {name} is in its groups in the checkpoint, not here{_guess(name, here)}")


def match_schedulers(schedulers: Sequence[Any], saved: Sequence[str]) -> list[str]:
    """Compare schedulers with the classes of a checkpoint's; an empty name means that the class is unknown."""
    own = [type(one).__name__ for one in schedulers]
    if len(own) != len(saved):
        held = ", ".join(name for name in saved if name) or str(len(saved))
        return [f"schedulers: {held} in the checkpoint, {', '.join(own) or 'none'} here"]
    pairs = enumerate(zip(own, saved, strict=True))
    return [
        f"scheduler {number}: {theirs} in the checkpoint, {mine} here"
        for number, (mine, theirs) in pairs
        if theirs and mine != theirs
    ]


def refuse(path: Path, what: str, problems: Sequence[str], advice: str) -> None:
    """Raise an error that lists the mismatches, if there are any.

    Raises:
        CheckpointError: ``problems`` is not empty.
    """
    if problems:
        raise CheckpointError(f"{path} does not fit {what}: {listed(problems)}. {advice}")


def listed(problems: Iterable[str]) -> str:
    """Join problems in one line; only the first ones if there are many."""
    every = list(problems)
    more = f"; and {len(every) - _MAX_SHOWN} more" if len(every) > _MAX_SHOWN else ""
    return "; ".join(every[:_MAX_SHOWN]) + more


def _guess(name: str, known: Iterable[str]) -> str:
    guess = did_you_mean(name, known).strip()
    return f" ({guess[0].lower()}{guess[1:]})" if guess else ""
