"""``Split``: several optimizers as one, each for the parameters whose names match its patterns."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .errors import ConfigurationError, did_you_mean
from .wording import first_of

Patterns = str | tuple[str, ...]
Factory = Callable[[list[Tensor]], Optimizer]

_EXAMPLE = (
    "Split(self.named_parameters(), {'blocks.*': partial(torch.optim.Muon, lr=0.02), '*': torch.optim.AdamW}), with "
    "functools.partial"
)
_MAX_SHOWN = 3
PATTERN = "pattern"
"""The key of a parameter group that names the patterns of its optimizer."""


class Split(Optimizer):
    """Update parameters by several optimizers, chosen by patterns of their names, as one optimizer.

    Its ``param_groups`` are those of all its optimizers: the same dicts, each with its own hyperparameters, so a
    learning rate scheduler changes every group from the group's own rate. ``state`` holds the state of all parameters,
    and ``state_dict`` has the usual form. In each group, ``"pattern"`` has the patterns of its optimizer, and
    ``"name"`` a name that is unique in the ``Split``, such as ``"Muon"``.

    Example::

        def configure_optimizers(self):
            return Split(
                self.named_parameters(),
                {
                    ("*.attention.*.weight", "*.mlp.*.weight"): partial(torch.optim.Muon, lr=0.02),
                    "*": partial(torch.optim.AdamW, lr=3e-4),
                },
            )

    Args:
        named_parameters: pairs of a name and a parameter, such as ``self.named_parameters()``.
        optimizers: a function from a list of parameters to an optimizer for each pattern or tuple of patterns. Patterns
            are those of the shell, in which ``*`` matches dots too. The first match applies, so the order matters. An
            optimizer may have several parameter groups.

    Attributes:
        optimizers: the optimizers, in the order of their patterns.

    Raises:
        ConfigurationError: a pattern matches no parameter that earlier ones have left, a trainable parameter matches
            none, a parameter has two names, or an optimizer cannot be built of the parameters of its patterns.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]], optimizers: Mapping[Patterns, Factory]) -> None:
        _check_factories(optimizers)
        chosen = _by_pattern(_checked_pairs(named_parameters), optimizers)
        self.optimizers: list[Optimizer] = []
        seen: Counter[str] = Counter()
        for patterns, factory in optimizers.items():
            part = _built(patterns, factory, chosen[patterns])
            for group in part.param_groups:
                kind = type(part).__name__
                group[PATTERN] = _joined(patterns)
                group.setdefault("name", f"{kind}-{seen[kind]}" if seen[kind] else kind)
                seen[kind] += 1
            self.optimizers.append(part)
        defaults = [part.defaults.items() for part in self.optimizers]
        common = {key: value for key, value in defaults[0] if all((key, value) in each for each in defaults[1:])}
        super().__init__([group for part in self.optimizers for group in part.param_groups], common)
        self._share_state()

    def _share_state(self) -> None:
        """Let every optimizer read and write the one state that checkpoints and strategies see."""
        for part in self.optimizers:
            # Some, such as Adagrad, have state before the first step.
            self.state.update(part.state)
            Optimizer.__setstate__(part, {"state": self.state})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer whose patterns the key ``"pattern"`` names.

        Raises:
            ConfigurationError: the key is missing or has another value.
        """
        if any(known is param_group for part in self.optimizers for known in part.param_groups):
            super().add_param_group(param_group)
            return
        known = {str(group[PATTERN]): part for part in self.optimizers for group in part.param_groups}
        given = param_group.get(PATTERN)
        if given not in known:
            raise ConfigurationError(
                f"add_param_group: Split needs the patterns of the optimizer that updates the group, {PATTERN!r}: one "
                f"of {', '.join(map(repr, known))}; it has {given!r}.{did_you_mean(str(given), known)}"
            )
        known[given].add_param_group(param_group)
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let every optimizer update its parameters; return the result of the closure, which runs before.

        Args:
            closure: computes the loss and its gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.optimizers:
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict`` returned, by position; groups stay with their optimizers."""
        members = [[_position(group, self.param_groups) for group in part.param_groups] for part in self.optimizers]
        patterns = [group[PATTERN] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, own in zip(self.param_groups, patterns, strict=True):
            group[PATTERN] = own
        for part, positions in zip(self.optimizers, members, strict=True):
            groups = [self.param_groups[each] for each in positions]
            own = {each: self.state[each] for group in groups for each in group["params"] if each in self.state}
            # Optimizers complete in it what an older version has saved.
            part.__setstate__({"state": defaultdict(dict, own), "param_groups": groups})
        self._share_state()

    def over(self, groups: Sequence[dict[str, Any]], copied: Callable[[Optimizer, list[Any]], Optimizer]) -> Split:
        """Return a copy without state that updates the parameters of other groups.

        Args:
            groups: groups with the key ``"pattern"`` of one of the optimizers.
            copied: returns a copy of an optimizer, without state, with the groups that it is given.
        """
        made = object.__new__(type(self))
        own = [part.param_groups[0][PATTERN] for part in self.optimizers]
        made.optimizers = [
            copied(part, [group for group in groups if group[PATTERN] == pattern])
            for part, pattern in zip(self.optimizers, own, strict=True)
        ]
        copies = {pattern: iter(part.param_groups) for part, pattern in zip(made.optimizers, own, strict=True)}
        Optimizer.__init__(made, [next(copies[group[PATTERN]]) for group in groups], self.defaults)
        made._share_state()
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "optimizers": self.optimizers}

    def __repr__(self) -> str:
        return f"Split({', '.join(map(repr, self.optimizers))})"


def optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that compute the updates: those of a ``Split``, else the given one."""
    return optimizer.optimizers if isinstance(optimizer, Split) else [optimizer]


def kind_of(optimizer: Optimizer) -> str:
    """Return the class of an optimizer as checkpoints record it; a ``Split`` includes those of its optimizers."""
    name = type(optimizer).__name__
    parts = optimizers_in(optimizer)
    return name if parts == [optimizer] else f"{name}({', '.join(type(part).__name__ for part in parts)})"


def needs_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer's ``step`` requires a closure that computes the loss."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


# ---- construction -------------------------------------------------------------------------------------------------


def _joined(patterns: Patterns) -> str:
    return patterns if isinstance(patterns, str) else ", ".join(patterns)


def _position(group: dict[str, Any], groups: Sequence[dict[str, Any]]) -> int:
    return next(position for position, each in enumerate(groups) if each is group)


def _check_factories(optimizers: Any) -> None:
    if not isinstance(optimizers, Mapping) or not optimizers:
        raise ConfigurationError(f"Split needs a dict from patterns of names to functions, as in {_EXAMPLE}.")
    for patterns, factory in optimizers.items():
        listed = (patterns,) if isinstance(patterns, str) else patterns
        if not isinstance(listed, tuple) or not listed or not all(isinstance(each, str) for each in listed):
            raise ConfigurationError(f"Split: {patterns!r} must be a pattern of names, or a tuple of patterns.")
        if isinstance(factory, Optimizer) or not callable(factory):
            raise ConfigurationError(
                f"Split: {_joined(patterns)!r} is given a {type(factory).__name__} object: give a function that builds "
                f"the optimizer of the parameters that match, as in {_EXAMPLE}."
            )


def _checked_pairs(given: Iterable[Any]) -> list[tuple[str, Tensor]]:
    pairs = list(given)
    first: dict[int, str] = {}
    for each in pairs:
        if not (isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str)):
            raise ConfigurationError(
                f"Split takes pairs of a name and a parameter, not a {type(each).__name__}: pass "
                "self.named_parameters()."
            )
        name, parameter = each
        if id(parameter) in first:
            raise ConfigurationError(
                f"Split: {first[id(parameter)]} and {name} are names of the same parameter: pass "
                "self.named_parameters(), which has one name for each."
            )
        first[id(parameter)] = name
    return pairs


def _by_pattern(
    pairs: Sequence[tuple[str, Tensor]], optimizers: Mapping[Patterns, Any]
) -> dict[Patterns, list[tuple[str, Tensor]]]:
    """Return the parameters of each key; a trainable parameter belongs to exactly one."""
    chosen: dict[Patterns, list[tuple[str, Tensor]]] = {patterns: [] for patterns in optimizers}
    left: list[str] = []
    for name, parameter in pairs:
        owner = next((patterns for patterns in optimizers if _matches(name, patterns)), None)
        if owner is not None:
            chosen[owner].append((name, parameter))
        elif parameter.requires_grad:
            left.append(name)
    for patterns, found in chosen.items():
        if not found:
            raise ConfigurationError(_without_parameters(patterns, [name for name, _ in pairs]))
    if left:
        raise ConfigurationError(
            f"Split: no pattern matches {first_of(left, _MAX_SHOWN)}: add a last pattern '*' with the optimizer of the "
            "rest, or freeze them."
        )
    return chosen


def _matches(name: str, patterns: Patterns) -> bool:
    return any(fnmatchcase(name, each) for each in ((patterns,) if isinstance(patterns, str) else patterns))


def _without_parameters(patterns: Patterns, names: Sequence[str]) -> str:
    taken = [name for name in names if _matches(name, patterns)]
    if taken:
        return (
            f"Split: every parameter that {_joined(patterns)!r} matches, such as {taken[0]}, matches an earlier "
            "pattern too, and the first one applies: put it before that one."
        )
    hint = did_you_mean(_joined(patterns), names) or f" The names are {first_of(names, _MAX_SHOWN)}."
    return f"Split: {_joined(patterns)!r} matches no name of a parameter.{hint}"


def _built(patterns: Patterns, factory: Factory, members: Sequence[tuple[str, Tensor]]) -> Optimizer:
    parameters = [parameter for _, parameter in members]
    where = f"Split: {_joined(patterns)!r}"
    try:
        part: Any = factory(parameters)
    except (ValueError, TypeError, RuntimeError) as error:
        odd = [f"{name} of shape {list(parameter.shape)}" for name, parameter in members if parameter.dim() != 2]
        matched = first_of(odd, _MAX_SHOWN)
        cause = f" It matches {matched}; an earlier pattern could give them another optimizer." if odd else ""
        raise ConfigurationError(f"{where} cannot build its optimizer: {error}.{cause}") from error
    if not isinstance(part, Optimizer):
        raise ConfigurationError(
            f"{where} must build an optimizer of a list of parameters, not a {type(part).__name__}."
        )
    held = {id(parameter) for group in part.param_groups for parameter in group["params"]}
    if held != set(map(id, parameters)):
        raise ConfigurationError(f"{where} must build its optimizer of exactly the parameters that it is called with.")
    if needs_closure(part):
        raise ConfigurationError(
            f"{where} builds {type(part).__name__}, which evaluates the loss several times for an update of all "
            "parameters: use it alone, with automatic_optimization = False."
        )
    return part
