"""Imported names of other frameworks, and the expressions of a file that use them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import libcst as cst

from .edits import Outcome
from .names import Framework, Missing, Target, counterpart, framework_of, other_framework_of
from .source import Source, bound_name, dotted


@dataclass
class Binding:
    """One imported name of a file.

    Attributes:
        name: the name in the file.
        path: the full dotted name that it was imported from.
        uses: the expressions that begin with the name, with the full names that they have.
    """

    name: str
    path: str
    statement: cst.Import | cst.ImportFrom
    alias: cst.ImportAlias
    framework: Framework
    uses: list[tuple[cst.Name | cst.Attribute, str]] = field(default_factory=list)

    @property
    def target(self) -> Target | Missing | None:
        return counterpart(self.path)

    @property
    def is_renamed(self) -> bool:
        return self.alias.asname is not None


def imported_frameworks(source: Source) -> set[Framework]:
    """Return the known frameworks that a file imports, phalanx among them."""
    paths = [path for statement in source.walk(cst.Import, cst.ImportFrom) for path, _ in _imported(statement)]
    return {framework for path in paths if (framework := framework_of(path)) is not None}


def bindings(source: Source, outcome: Outcome) -> list[Binding]:
    """Return the imported names of other frameworks with their uses. An import with ``*`` is left to the user."""
    found = []
    for statement in source.walk(cst.Import, cst.ImportFrom):
        for path, alias in _imported(statement):
            if (framework := other_framework_of(path)) is None:
                continue
            if alias is None:
                outcome.leave(
                    source.line(statement), f"name what is imported from {path} instead of *.", framework.page
                )
                continue
            found.append(Binding(bound_name(alias), path, statement, alias, framework))
    _collect_uses(source, found)
    return found


def _imported(statement: cst.Import | cst.ImportFrom) -> Iterator[tuple[str, cst.ImportAlias | None]]:
    if isinstance(statement, cst.Import):
        for alias in statement.names:
            yield alias.evaluated_name, alias
    elif not statement.relative and (module := dotted(statement.module)):
        if isinstance(statement.names, cst.ImportStar):
            yield module, None
            return
        for alias in statement.names:
            yield f"{module}.{alias.evaluated_name}", alias


def _collect_uses(source: Source, found: Iterable[Binding]) -> None:
    """Add to each binding the expressions that use it: of ``pl.Trainer.fit`` the part ``pl.Trainer``.

    ``references`` yields an expression before its parts, so that the longest one with a counterpart is found first.
    """
    by_name: dict[str, list[Binding]] = {}
    for binding in found:
        by_name.setdefault(binding.name.partition(".")[0], []).append(binding)
    parts_of_uses: set[cst.CSTNode] = set()
    for node in source.references():
        first = (dotted(node) or "").partition(".")[0]
        if node in parts_of_uses or first not in by_name:
            continue
        # A name that a try statement imports, and its except clause from elsewhere, has several paths: one is enough.
        path = next((each for each in source.imported_names(node) if _has_counterpart(each)), None)
        if path is None:
            continue
        parts_of_uses.update(_parts(node))
        for binding in by_name[first]:
            if _gives_access(binding, path):
                binding.uses.append((node, path))


def _has_counterpart(path: str) -> bool:
    """Whether a full name is one of another framework; a method of a class, such as ``pl.Trainer.fit``, is none."""
    return counterpart(path) is not None and other_framework_of(path) is not None


def _gives_access(binding: Binding, path: str) -> bool:
    """Whether an import gives access to a full name; ``import a.b`` binds ``a``, so it does for all names below."""
    if isinstance(binding.statement, cst.Import) and not binding.is_renamed:
        return path.partition(".")[0] == binding.path.partition(".")[0]
    return path == binding.path or path.startswith(f"{binding.path}.")


def _parts(node: cst.BaseExpression) -> Iterator[cst.CSTNode]:
    """Yield the expressions before each dot of a chain of names."""
    while isinstance(node, cst.Attribute):
        node = node.value
        yield node
