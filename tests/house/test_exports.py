"""The public face: what it names exists, is documented, is registered, and is the same for people and type checkers."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import get_origin

import pytest

import phalanx
from phalanx.framework.core.registry import CALLBACKS, LOGGERS, PRECISIONS, STRATEGIES, Registry

ROOT = Path(phalanx.__file__).parent
FACES = (
    "phalanx",
    "phalanx.checkpoint",
    "phalanx.errors",
    "phalanx.hf",
    "phalanx.profilers",
    "phalanx.registry",
    "phalanx.strategies",
    "phalanx.precisions",
    "phalanx.callbacks",
    "phalanx.loggers",
)
KINDS = {
    "strategies": (STRATEGIES, "phalanx.framework.parallel.strategy:Strategy"),
    "precisions": (PRECISIONS, "phalanx.framework.core.precision:Precision"),
    "callbacks": (CALLBACKS, "phalanx.framework.api.callback:Callback"),
    "loggers": (LOGGERS, "phalanx.framework.metrics.logger:Logger"),
}


def unresolved(face: ModuleType) -> list[str]:
    """Return the names in ``__all__`` that the module does not have, or that it names twice."""
    names = list(face.__all__)
    return [name for name in names if not hasattr(face, name) or names.count(name) > 1]


def lazy_table(tree: ast.Module) -> dict[str, str]:
    """Return name -> relative module of every table of homes in a module with lazy imports."""
    table: dict[str, str] = {}
    for node in (node for statement in tree.body for node in ast.walk(statement)):
        if isinstance(node, ast.Dict):
            for home, names in zip(node.keys, node.values, strict=True):
                if isinstance(home, ast.Constant) and isinstance(names, ast.Constant) and str(home.value)[:1] == ".":
                    table.update(dict.fromkeys(str(names.value).split(), str(home.value)))
    return table


def typed_table(tree: ast.Module) -> dict[str, str]:
    """Return name -> relative module of what a face imports for type checkers."""
    table: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                if isinstance(statement, ast.ImportFrom) and statement.level:
                    for alias in statement.names:
                        table[alias.asname or alias.name] = "." * statement.level + (statement.module or "")
    return table


def disagreements(source: str) -> list[str]:
    """Return the names whose home a lazy face tells differently to people and to type checkers."""
    tree = ast.parse(source)
    lazy, typed = lazy_table(tree), typed_table(tree)
    if not lazy:
        return []
    found = [f"{name} is in one table only" for name in sorted(lazy.keys() ^ typed.keys())]
    for name in sorted(lazy.keys() & typed.keys()):
        if lazy[name] != typed[name]:
            found.append(f"{name} lives in {lazy[name]} and is typed as of {typed[name]}")
    return found


def is_class(value: object) -> bool:
    """Whether an object is a class. An alias such as ``Callable[[int], int]`` is one for Python before 3.11."""
    return inspect.isclass(value) and get_origin(value) is None


def undocumented(face: ModuleType) -> list[str]:
    """Return the public classes and functions that have no docstring of their own."""
    objects = {name: getattr(face, name) for name in face.__all__}
    return [
        name
        for name, value in objects.items()
        if (is_class(value) or inspect.isfunction(value)) and not (value.__doc__ or "").strip()
    ]


def unregistered(classes: Iterable[type], base: type, targets: Iterable[object]) -> list[str]:
    """Return the concrete public classes of a kind that no name of the registry loads."""
    known = list(targets)
    return [
        kind.__name__
        for kind in classes
        if issubclass(kind, base) and kind is not base and not inspect.isabstract(kind) and kind not in known
    ]


def load(target: str) -> type:
    module, _, attribute = target.partition(":")
    found: type = getattr(import_module(module), attribute)
    return found


@pytest.mark.parametrize("face", FACES)
def test_every_public_name_resolves_is_shown_is_documented_and_is_the_same_for_type_checkers(face: str) -> None:
    module = import_module(face)
    assert not unresolved(module)
    assert set(module.__all__) <= set(dir(module))
    assert not undocumented(module)
    assert not disagreements(Path(str(module.__file__)).read_text())


@pytest.mark.parametrize(("registry", "base"), KINDS.values(), ids=KINDS)
def test_every_registered_name_loads(registry: Registry, base: str) -> None:
    for name in registry:
        assert callable(registry.load(name)), name


@pytest.mark.parametrize("folder", KINDS)
def test_every_public_plugin_has_a_name(folder: str) -> None:
    registry, base = KINDS[folder]
    face = import_module(f"phalanx.{folder}")
    classes = [value for name in face.__all__ if is_class(value := getattr(face, name))]
    assert not unregistered(classes, load(base), [registry.load(name) for name in registry])


def test_a_name_that_does_not_exist_is_found() -> None:
    face = ModuleType("face")
    face.__dict__.update(__all__=["here", "gone"], here=1)
    assert unresolved(face) == ["gone"]


@pytest.mark.parametrize(
    "typed",
    ["", "    from .a import Other as Other\n", "    from .b import Name as Name\n"],
    ids=["missing", "another name", "another home"],
)
def test_a_planted_disagreement_of_the_faces_is_found(typed: str) -> None:
    source = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import os\n{typed}\nT = {{'.a': 'Name'}}\n"
    assert disagreements(source)


def test_agreeing_faces_are_not_reported() -> None:
    source = (
        "if TYPE_CHECKING:\n    from .a import Name as Name, Other as Other\n    from . import n as n\n"
        "T = {'.a': 'Name Other'}\nf(M, {'.': 'n'})\n"
    )
    assert not disagreements(source)


def test_a_planted_class_without_docstring_or_name_is_found() -> None:
    class Base:
        """Documented."""

    class Bare(Base):
        pass

    face = ModuleType("face")
    face.__dict__.update(__all__=["Base", "Bare"], Base=Base, Bare=Bare)
    assert undocumented(face) == ["Bare"]
    assert unregistered([Base, Bare], Base, [Base]) == ["Bare"]
    assert not unregistered([Base, Bare], Base, [Bare])
