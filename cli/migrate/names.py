"""Names of Lightning and Accelerate, looked up in phalanx itself.

There is no table of names here: ``phalanx.compat`` has each name with its meaning there, or refuses it with a sentence
that says what to use instead. A name whose object phalanx exports itself gets phalanx's own name. Names of phalanx are
looked up as well: a program has them after its rewriting, and what was left in it is found again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from .edits import ACCELERATE_PAGE, LIGHTNING_PAGE

_PACKAGE = __name__.partition(".cli.")[0]
_COMPAT, _ACCELERATE = f"{_PACKAGE}.compat.lightning", f"{_PACKAGE}.compat.accelerate"
# phalanx's own public modules.
OWN_MODULES = tuple(
    f"{_PACKAGE}{module}"
    for module in ("", ".callbacks", ".loggers", ".strategies", ".hf", ".profilers", ".precisions", ".errors")
)


@dataclass(frozen=True)
class Framework:
    """A package whose names are known: those of other frameworks are rewritten.

    Attributes:
        root: the package.
        compatible: the module of ``phalanx.compat`` that has its names.
        page: the page of the documentation about it.
        has_own_names: whether phalanx's own names are preferred to those of that module.
    """

    root: str
    compatible: str
    page: str
    has_own_names: bool = True

    @property
    def is_phalanx(self) -> bool:
        """Whether it is phalanx itself, whose names stay."""
        return self.root == self.compatible


FRAMEWORKS = (
    Framework("lightning.pytorch", _COMPAT, LIGHTNING_PAGE),
    Framework("lightning.fabric", f"{_COMPAT}.fabric", LIGHTNING_PAGE),
    Framework("lightning", _COMPAT, LIGHTNING_PAGE),
    Framework("pytorch_lightning", _COMPAT, LIGHTNING_PAGE),
    Framework("lightning_fabric", f"{_COMPAT}.fabric", LIGHTNING_PAGE),
    Framework("accelerate", _ACCELERATE, ACCELERATE_PAGE, has_own_names=False),
    Framework(_COMPAT, _COMPAT, LIGHTNING_PAGE),
    Framework(_ACCELERATE, _ACCELERATE, ACCELERATE_PAGE, has_own_names=False),
    Framework(_PACKAGE, _PACKAGE, LIGHTNING_PAGE),
)
# Packages beside the trainer that share its name, whose objects have no counterpart.
_BESIDE = ("lightning.app", "lightning.data", "lightning.pytorch_lightning")


@dataclass(frozen=True)
class Target:
    """A name of phalanx: ``module`` and the attribute ``name`` in it, or the module itself if the name is empty."""

    module: str
    name: str
    value: Any

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module

    @property
    def is_module(self) -> bool:
        return isinstance(self.value, ModuleType)


@dataclass(frozen=True)
class Missing:
    """A name without a counterpart, and the sentence that says what to use instead."""

    reason: str


def framework_of(dotted: str) -> Framework | None:
    """Return the framework that a dotted name belongs to, which may be phalanx itself."""
    return next((each for each in FRAMEWORKS if _is_below(dotted, each.root)), None)


def other_framework_of(dotted: str) -> Framework | None:
    """Return the framework that a dotted name belongs to; None for a name of phalanx itself, which stays."""
    framework = framework_of(dotted)
    return None if framework is None or framework.is_phalanx else framework


@cache
def counterpart(dotted: str) -> Target | Missing | None:
    """Return the name of phalanx for a name of another framework, or of phalanx; None if it belongs to none of them.

    An attribute of a class, such as ``lightning.Trainer.fit``, is not a name: None is returned for it too.
    """
    framework = framework_of(dotted)
    if framework is None:
        return None
    if any(_is_below(dotted, each) for each in _BESIDE):
        return Missing(f"phalanx has no counterpart of {dotted}.")
    path = dotted[len(framework.root) + 1 :].split(".") if dotted != framework.root else []
    module: Any = import_module(framework.compatible)
    for index, part in enumerate(path):
        if not isinstance(module, ModuleType):
            return None
        try:
            value = _member(module, part)
        except ImportError as error:
            return _reexported(framework, path) or Missing(f"{str(error).rstrip('.')}.")
        if index == len(path) - 1:
            return _named(module, part, value, framework)
        module = value
    return Target(framework.compatible, "", module)


def _member(module: ModuleType, name: str) -> Any:
    """Return an attribute or submodule of a module.

    Raises:
        ImportError: there is neither; the message says what to use instead, if that is known.
    """
    try:
        return getattr(module, name)
    except AttributeError:
        missing = f"{module.__name__} has no {name}."
    if module.__name__ == _PACKAGE:
        # Beside its public modules, which are attributes, it has programs: importing one would run it.
        raise ImportError(missing)
    try:
        return import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:
        raise ImportError(missing) from None


def _reexported(framework: Framework, path: list[str]) -> Target | Missing | None:
    """Return the counterpart that a package has for a name, if the name was taken from a module in that package."""
    advice = None
    for length in range(len(path) - 2, -1, -1):
        found = counterpart(".".join([framework.root, *path[:length], path[-1]]))
        if isinstance(found, Target) and not found.is_module:
            return found
        if isinstance(found, Missing) and ": " in found.reason:
            advice = advice or found
    return advice


def _named(module: ModuleType, name: str, value: Any, framework: Framework) -> Target:
    if isinstance(value, ModuleType):
        own = next(_own_modules(value), value) if framework.has_own_names else value
        return Target(own.__name__, "", own)
    if framework.has_own_names:
        # The own module of the same name comes first: both `phalanx` and `phalanx.callbacks` have `Callback`.
        tail = module.__name__.rpartition(".")[2]
        for own_name in sorted(OWN_MODULES, key=lambda each: each.rpartition(".")[2] != tail):
            own = import_module(own_name)
            for candidate in dict.fromkeys((name, getattr(value, "__name__", name))):
                if candidate in own.__all__ and getattr(own, candidate) is value:
                    return Target(own_name, candidate, value)
    return Target(module.__name__, name, value)


def _own_modules(compatible: ModuleType) -> Iterator[ModuleType]:
    """Yield the own module that a compatible module takes all of its names from."""
    look_up = vars(compatible).get("__getattr__")
    for name in OWN_MODULES[1:]:
        own = import_module(name)
        if look_up is not None and vars(own).get("__getattr__") is look_up:
            yield own


def _is_below(dotted: str, root: str) -> bool:
    return dotted == root or dotted.startswith(f"{root}.")
