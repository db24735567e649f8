"""Parts of a program that a translation as a whole needs: assigned calls, their arguments, uses of a variable."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import libcst as cst

from .edits import Outcome
from .source import Source, bound_name, dotted, from_import_lines, whole_line

_WIDTH = 100


@dataclass
class AssignedCall:
    """``name = function(keyword=value, ...)`` as a statement of its own.

    Attributes:
        name: the variable.
        line: the statement.
        call: the call.
        arguments: the keyword arguments by name.
    """

    name: str
    line: cst.SimpleStatementLine
    call: cst.Call
    arguments: dict[str, cst.Arg]


class CannotTranslate(Exception):
    """A program that is not of the form that is translated.

    Args:
        parts: the parts that are not, each with a sentence for the list of what is left.
    """

    def __init__(self, *parts: tuple[cst.CSTNode, str]) -> None:
        super().__init__(*(reason for _, reason in parts))
        self.parts = parts


def is_called(source: Source, node: cst.BaseExpression, names: Collection[str]) -> bool:
    return any(path in names for path in source.imported_names(node))


def the_call(source: Source, names: Collection[str], what: str) -> AssignedCall:
    """Return the only call of one of these functions.

    Raises:
        CannotTranslate: there are several, it has arguments by position, or it is not assigned to a variable.
    """
    calls = [call for call in source.walk(cst.Call) if is_called(source, call.func, names)]
    if not calls:
        raise CannotTranslate((source.tree, f"{what} is not created in this file"))
    if len(calls) > 1:
        raise CannotTranslate((calls[1], f"{what} is created more than once"))
    call = calls[0]
    assignment = source.parent(call)
    line = source.parent(assignment) if assignment is not None else None
    if not isinstance(assignment, cst.Assign) or not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
        raise CannotTranslate((call, f"{what} is not assigned to a variable in a statement of its own"))
    target = assignment.targets[0].target
    if len(assignment.targets) > 1 or not isinstance(target, cst.Name):
        raise CannotTranslate((call, f"{what} is not assigned to one variable"))
    for argument in call.args:
        if argument.keyword is None:
            raise CannotTranslate((argument, f"{what} has an argument without its name"))
    arguments = {each.keyword.value: each for each in call.args if each.keyword is not None}
    return AssignedCall(target.value, line, call, arguments)


def uses_of(source: Source, name: str) -> list[cst.Name]:
    """Return the expressions that read a variable, in the order of the text."""
    reads = [each for each in source.references() if isinstance(each, cst.Name) and each.value == name]
    return [each for each in reads if not isinstance(source.parent(each), cst.AssignTarget)]


def method_call(source: Source, use: cst.Name) -> tuple[str, cst.Call] | None:
    """Return the method and the call for ``variable.method(...)``."""
    attribute = source.parent(use)
    call = source.parent(attribute) if attribute is not None else None
    if isinstance(attribute, cst.Attribute) and isinstance(call, cst.Call) and call.func is attribute:
        return attribute.attr.value, call
    return None


def is_statement(source: Source, call: cst.Call) -> bool:
    """Whether a call is a line of its own, whose value is not used."""
    expression = source.parent(call)
    line = source.parent(expression) if isinstance(expression, cst.Expr) else None
    return isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1


def top_level(source: Source, node: cst.CSTNode) -> cst.CSTNode:
    """Return the statement of the module that a node is in."""
    while not isinstance(parent := source.parent(node), cst.Module):
        assert parent is not None
        node = parent
    return node


def before_comments(source: Source, node: cst.CSTNode) -> int:
    """Return the position of the line that a statement of the module begins on, or of the comments right above it."""
    start, _ = source.span(node)
    lines = source.text[:start].splitlines(keepends=True)
    while lines and lines[-1].startswith(b"#"):
        start -= len(lines.pop())
    return start


def require_same_block(source: Source, first: cst.CSTNode, second: cst.CSTNode) -> None:
    """Raise ``CannotTranslate`` unless two statements are in the same function, or both outside of one."""
    if source.ancestor(first, cst.FunctionDef) is not source.ancestor(second, cst.FunctionDef):
        raise CannotTranslate((second, "it is in another function than what it belongs to"))


def end_of_line(source: Source, node: cst.CSTNode) -> int:
    """Return the position of the line break after a node, behind a comment on its line."""
    _, end = source.span(node)
    found = source.text.find(b"\n", end)
    return len(source.text) if found < 0 else found


def call_text(start: str, positional: Iterable[str], keywords: Mapping[str, str]) -> str:
    """Return ``start(positional, name=value, ...)``, with a line for each argument if one line is too long."""
    arguments = [*positional, *(f"{name}={value}" for name, value in keywords.items())]
    text = f"{start}({', '.join(arguments)})"
    return text if len(text) <= _WIDTH else "\n".join([f"{start}(", *(f"    {each}," for each in arguments), ")"])


def free_name(source: Source, wanted: str) -> str:
    """Return a name that the file does not use."""
    used = set(re.findall(r"\w+", source.text.decode(source.encoding)))
    while wanted in used:
        wanted += "_"
    return wanted


def indented(text: str, indentation: str, newline: str) -> str:
    """Return lines with the indentation of a block before each but the first."""
    return newline.join(
        f"{indentation}{line}" if line and index else line for index, line in enumerate(text.split("\n"))
    )


def replace_imports(
    source: Source, outcome: Outcome, removed: Collection[str], modules: Collection[str], user: cst.CSTNode
) -> None:
    """Take names out of the imports of a file, and import modules that it does not import yet.

    A module is no longer imported either if all names that the file uses of it are removed.

    Args:
        source: the file.
        outcome: gets the edits.
        removed: the full names that the file needs no longer.
        modules: the modules that it needs.
        user: the first statement of the file that uses them.
    """
    statements = {each: _kept(source, each, removed) for each in source.walk(cst.Import, cst.ImportFrom)}
    first = before_comments(source, user)
    earlier = [each for each in statements if _is_global(source, each) and source.span(each)[0] < first]
    present = {bound_name(alias) for each in earlier if isinstance(each, cst.Import) for alias in statements[each]}
    added = [f"import {module}" for module in modules if module not in present]
    for statement, kept in statements.items():
        if isinstance(statement.names, cst.ImportStar) or len(kept) == len(statement.names):
            continue
        lines = added if statement in earlier else []
        added = [] if statement in earlier else added
        text = "\n".join([*lines, *_import_lines(source, statement, kept)])
        span = source.span(statement)
        if text:
            text = indented(text, source.indentation(statement), source.tree.default_newline)
            outcome.replace(span, text, source.line(statement))
        elif source.has_siblings(statement):
            outcome.replace(whole_line(source.text, *span), "", source.line(statement))
        else:
            outcome.replace(span, "pass", source.line(statement))
    if added:
        outcome.replace((first, first), source.tree.default_newline.join([*added, "", "", ""]), source.line(user))


def _is_global(source: Source, statement: cst.Import | cst.ImportFrom) -> bool:
    """Whether an import is a statement of the module itself."""
    line = source.parent(statement)
    return line is not None and isinstance(source.parent(line), cst.Module)


def _import_lines(
    source: Source, statement: cst.Import | cst.ImportFrom, kept: Collection[cst.ImportAlias]
) -> list[str]:
    names = [source.code(alias) for alias in kept]
    if not names or isinstance(statement, cst.Import):
        return [f"import {', '.join(names)}"] if names else []
    return from_import_lines(f"{'.' * len(statement.relative)}{dotted(statement.module) or ''}", names)


def _kept(source: Source, statement: cst.Import | cst.ImportFrom, removed: Collection[str]) -> list[cst.ImportAlias]:
    """Return the names of an import that the file needs without the removed ones."""
    if isinstance(statement.names, cst.ImportStar):
        return []
    if isinstance(statement, cst.ImportFrom):
        module = dotted(statement.module) if not statement.relative else None
        return [each for each in statement.names if f"{module}.{each.evaluated_name}" not in removed]
    return [each for each in statement.names if not _is_spent(source, each, removed)]


def _is_spent(source: Source, alias: cst.ImportAlias, removed: Collection[str]) -> bool:
    """Whether a module is imported for removed names alone."""
    module = alias.evaluated_name if alias.asname else alias.evaluated_name.partition(".")[0]
    used = {path for each in source.references() for path in source.imported_names(each)}
    below = {path for path in used if path.startswith(f"{module}.")}
    whole = {path for path in below if not any(name.startswith(f"{path}.") for name in below)}
    return bool(whole) and whole <= set(removed)
