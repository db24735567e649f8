"""One Python file as libcst reads it: its tree, with the position, the scope and the full name of each expression."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import libcst as cst
from libcst import metadata

_WIDTH = 100


class Source:
    """The text of a file and its tree.

    Raises:
        libcst.ParserSyntaxError: the text is not Python.
    """

    def __init__(self, text: bytes) -> None:
        self.text = text
        wrapper = metadata.MetadataWrapper(cst.parse_module(text))
        self.tree = wrapper.module
        # The spans count the bytes of UTF-8.
        self._utf8 = None if self.encoding in ("utf-8", "utf8") else text.decode(self.encoding).encode()
        self._spans = wrapper.resolve(metadata.ByteSpanPositionProvider)
        self._positions = wrapper.resolve(metadata.PositionProvider)
        self._names = wrapper.resolve(metadata.QualifiedNameProvider)
        self._parents = wrapper.resolve(metadata.ParentNodeProvider)

    @property
    def encoding(self) -> str:
        return self.tree.encoding

    def span(self, node: cst.CSTNode) -> tuple[int, int]:
        """Return the first byte of a node and the one after its last."""
        span = self._spans[node]
        return self._offset(span.start), self._offset(span.start + span.length)

    def _offset(self, utf8_offset: int) -> int:
        if self._utf8 is None:
            return utf8_offset
        return len(self._utf8[:utf8_offset].decode().encode(self.encoding))

    def line(self, node: cst.CSTNode) -> int:
        line: int = self._positions[node].start.line
        return line

    def code(self, node: cst.CSTNode) -> str:
        """Return a node's own text."""
        start, end = self.span(node)
        return self.text[start:end].decode(self.encoding)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return self._parents.get(node)

    def imported_names(self, node: cst.CSTNode) -> list[str]:
        """Return the full dotted names that an expression has by imports, sorted; several after try and except."""
        found = self._names.get(node) or ()
        found = found() if callable(found) else found
        imported = metadata.QualifiedNameSource.IMPORT
        return sorted(each.name for each in found if each.source is imported)

    def indentation(self, node: cst.CSTNode) -> str:
        """Return the white space before the line that a node begins on."""
        start, _ = self.span(node)
        line = self.text[self.text.rfind(b"\n", 0, start) + 1 : start]
        return line[: len(line) - len(line.lstrip())].decode(self.encoding)

    @cached_property
    def identifiers(self) -> frozenset[str]:
        """The names that a statement of this file binds other than by an import."""
        collector = _Bound()
        self.tree.visit(collector)
        return frozenset(collector.found)

    def walk(self, *kinds: type[cst.CSTNode]) -> Iterator[Any]:
        """Yield the nodes of these kinds in the order of the text."""
        stack: list[cst.CSTNode] = [self.tree]
        while stack:
            node = stack.pop()
            if isinstance(node, kinds):
                yield node
            stack += reversed(node.children)

    def references(self) -> Iterator[cst.Name | cst.Attribute]:
        """Yield the expressions that may refer to an imported name: not those in imports, nor names of attributes,
        keywords, parameters and definitions."""
        collector = _References()
        self.tree.visit(collector)
        yield from collector.found


def dotted(node: cst.BaseExpression | None) -> str | None:
    """Return ``"a.b.c"`` for a chain of names, and None for another expression."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr.value}"
    return None


def bound_name(alias: cst.ImportAlias) -> str:
    """Return the name that an import binds, or the dotted one of a module without an alias."""
    asname = alias.asname.name if alias.asname else None
    return asname.value if isinstance(asname, cst.Name) else alias.evaluated_name


def from_import_lines(module: str, names: list[str]) -> list[str]:
    """Return ``from module import names``, with a line for each name if one line is too long."""
    line = f"from {module} import {', '.join(names)}"
    return [line] if len(line) <= _WIDTH else [f"from {module} import (", *(f"    {name}," for name in names), ")"]


def literal(node: cst.BaseExpression) -> Any:
    """Return the value of a number, a string, None, True or False; ``...`` for another expression."""
    if isinstance(node, cst.Name) and node.value in ("None", "True", "False"):
        return {"None": None, "True": True, "False": False}[node.value]
    if isinstance(node, cst.Integer | cst.Float | cst.SimpleString):
        return node.evaluated_value
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Minus):
        value = literal(node.expression)
        return -value if isinstance(value, int | float) else ...
    return ...


def whole_line(text: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the span of the lines of a statement with the line break, unless a comment follows on its line."""
    begin, after = text.rfind(b"\n", 0, start) + 1, text.find(b"\n", end)
    rest = text[end : after if after >= 0 else len(text)]
    if rest.strip():
        return start, end
    return begin, len(text) if after < 0 else after + 1


class _References(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.Name | cst.Attribute] = []

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.found.append(node)

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        self.found.append(node)
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Param(self, node: cst.Param) -> bool:
        for part in (node.annotation, node.default):
            if part is not None:
                part.visit(self)
        return False

    def visit_FunctionDef_name(self, node: cst.FunctionDef) -> None:
        self._kept = len(self.found)

    def leave_FunctionDef_name(self, node: cst.FunctionDef) -> None:
        del self.found[self._kept :]

    def visit_ClassDef_name(self, node: cst.ClassDef) -> None:
        self._kept = len(self.found)

    def leave_ClassDef_name(self, node: cst.ClassDef) -> None:
        del self.found[self._kept :]


class _Bound(cst.CSTVisitor):
    """Collects names of definitions, parameters, assignments and loops."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self.found.add(node.name.value)

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.found.add(node.name.value)

    def visit_Param(self, node: cst.Param) -> None:
        self.found.add(node.name.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:
        self._bind(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._bind(node.target)

    def visit_For(self, node: cst.For) -> None:
        self._bind(node.target)

    def visit_CompFor(self, node: cst.CompFor) -> None:
        self._bind(node.target)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        self._bind(node.target)

    def visit_AsName(self, node: cst.AsName) -> None:
        self._bind(node.name)

    def _bind(self, target: cst.CSTNode) -> None:
        if isinstance(target, cst.Name):
            self.found.add(target.value)
        elif isinstance(target, cst.Tuple | cst.List):
            for element in target.elements:
                self._bind(element.value)
