"""Parts of a program that is not translated as a whole: the line of each, and what takes its place in phalanx."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import libcst as cst

from .edits import Outcome
from .program import CannotTranslate
from .source import Source, dotted


@dataclass(frozen=True)
class Counterparts:
    """Advice for the names of a framework that have no exact counterpart.

    Attributes:
        root: the framework's package.
        title: its name in a sentence.
        page: the page of the documentation about it.
        names: for the last part of a name, or of the module that it is in, what to use instead.
        methods: for a class to derive from, what takes the place of each method that may be overridden.
    """

    root: str
    title: str
    page: str
    names: Mapping[str, str]
    methods: Mapping[str, Mapping[str, str]]

    def advice(self, path: str) -> tuple[str, str] | None:
        """Return the part of a full name that is known, and what to use instead."""
        if not path.startswith(f"{self.root}."):
            return None
        known = [part for part in reversed(path.split(".")) if part in self.names]
        return (known[0], self.names[known[0]]) if known else None


def translate_or_list(
    source: Source, outcome: Outcome, known: Counterparts, translate: Callable[[Outcome], None]
) -> None:
    """Translate a program as a whole; if a part of it cannot be, list that part and all counterparts instead.

    Args:
        translate: adds the edits; it may raise ``CannotTranslate``.
    """
    translated = Outcome()
    try:
        translate(translated)
    except CannotTranslate as error:
        for node, reason in error.parts:
            outcome.leave(source.line(node), f"the program of {known.title} is not translated: {reason}.", known.page)
        list_counterparts(source, outcome, known)
    else:
        outcome.extend(translated)


def list_counterparts(source: Source, outcome: Outcome, known: Counterparts) -> None:
    """Leave each use of a known name, and each method that overrides one of the framework's."""
    inside: set[cst.CSTNode] = set()
    for node in source.references():
        found = [] if node in inside or dotted(node) is None else source.imported_names(node)
        advice = next(filter(None, map(known.advice, found)), None)
        if advice is not None:
            inside.update(_below(node))
            outcome.leave(source.line(node), f"{dotted(node)}: {advice[1]}.", known.page)
    for definition in source.walk(cst.ClassDef):
        bases = {path.rpartition(".")[2] for each in definition.bases for path in source.imported_names(each.value)}
        for base in sorted(bases & known.methods.keys()):
            _list_methods(source, outcome, definition, known.methods[base], known.page)


def _below(node: cst.CSTNode) -> set[cst.CSTNode]:
    return {part for child in node.children for part in (child, *_below(child))}


def _list_methods(
    source: Source, outcome: Outcome, definition: cst.ClassDef, methods: Mapping[str, str], page: str
) -> None:
    for method in definition.body.body:
        if isinstance(method, cst.FunctionDef) and (advice := methods.get(method.name.value)):
            name = f"{definition.name.value}.{method.name.value}"
            outcome.leave(source.line(method), f"{name}: {advice}.", page)
