"""The page of all error messages, made from the places in the source that build an exception of ``phalanx.errors``.

A message is a pattern: ``{name}`` is a value that it gives, and ``…`` a part that is computed. The cause is the
condition that guards the place, as the source has it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from page_index import WIDE

_HOME = "framework/core/errors.py"
# A condition that is longer explains nothing; the message states the rule.
_LONGEST_CONDITION = 70
_COMPUTED = "…"

Function = ast.FunctionDef | ast.AsyncFunctionDef


class ErrorClass(NamedTuple):
    """An exception of phalanx."""

    name: str
    exit_code: int
    summary: str


class ErrorSite(NamedTuple):
    """A place that builds an exception."""

    message: str
    cause: str
    """The condition that guards it as source text; empty if there is no short one."""
    module: str
    kind: str


def error_page(root: Path, files: Iterable[Path]) -> str:
    """Return the page as Markdown: a table of the exceptions, and for each one a table of its messages."""
    classes = error_classes((root / _HOME).read_text(encoding="utf-8"))
    names = {each.name for each in classes}
    sites = sorted({site for file in files for site in sites_of(file, root, names)})
    lines = [
        "# Error messages",
        "",
        "Every message of phalanx's own exceptions, made from the source when this page is built. `{name}` is a value",
        "that the message gives, and `…` a part that depends on the case. The cause is the condition in the source.",
        "[Failures](failures.md) explains the exit codes.",
        "",
        "| exception | exit code | raised if | messages |",
        "|---|---|---|---|",
    ]
    counts = {each.name: sum(site.kind == each.name for site in sites) for each in classes}
    for each in classes:
        name = f"[`{each.name}`](#{each.name.lower()})" if counts[each.name] else f"`{each.name}`"
        lines.append(f"| {name} | {each.exit_code} | {each.summary} | {counts[each.name]} |")
    for each in classes:
        if counts[each.name]:
            lines += ["", f"## {each.name}", "", f"{each.summary} Exit code {each.exit_code}.", ""]
            lines += ["| message | cause | raised in |", "|---|---|---|"]
            lines += [_row(site) for site in sites if site.kind == each.name]
    return WIDE + "\n".join(lines) + "\n"


def error_classes(source: str) -> list[ErrorClass]:
    """Return the exceptions that a source defines, with the exit code that each inherits."""
    found: dict[str, ErrorClass] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        own = [code for part in node.body for code in _exit_codes(part)]
        bases = [found[base.id].exit_code for base in node.bases if isinstance(base, ast.Name) and base.id in found]
        summary = (ast.get_docstring(node) or "").partition("\n")[0]
        found[node.name] = ErrorClass(node.name, next(iter([*own, *bases]), 1), summary)
    return list(found.values())


def _exit_codes(node: ast.stmt) -> list[int]:
    """Return the value that a statement gives ``exit_code``; none if it does something else."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return []
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    is_code = any(isinstance(target, ast.Name) and target.id == "exit_code" for target in targets)
    return [ast.literal_eval(node.value)] if is_code else []


def sites_of(file: Path, root: Path, names: set[str]) -> Iterator[ErrorSite]:
    """Yield the places of a file that build one of the exceptions ``names`` with a message."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, Function)}
    module = ".".join(["phalanx", *file.relative_to(root).with_suffix("").parts]).removesuffix(".__init__")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and (kind := _called(node)) in names:
            around = list(_ancestors(node, parents))
            scope = next((each for each in around if isinstance(each, Function)), None)
            for message in _messages(node.args[0], scope, functions):
                if message.strip(f"{_COMPUTED}. "):
                    yield ErrorSite(message, _cause([node, *around]), module, kind)


def _called(call: ast.Call) -> str:
    """Return the last name of what is called."""
    return ast.unparse(call.func).rpartition(".")[2]


def _ancestors(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> Iterator[ast.AST]:
    while (parent := parents.get(node)) is not None:
        yield parent
        node = parent


def _messages(node: ast.expr, scope: Function | None, functions: dict[str, Function]) -> list[str]:
    """Return the patterns of a message: several where a variable or a function of the file holds it."""
    if isinstance(node, ast.Name) and scope is not None:
        values = [each.value for each in ast.walk(scope) if isinstance(each, ast.Assign) and _assigns(each, node.id)]
        return [text for value in values for text in _messages(value, None, functions)]
    if isinstance(node, ast.Call) and (called := functions.get(_called(node))) is not None:
        returned = [each.value for each in ast.walk(called) if isinstance(each, ast.Return) and each.value]
        return [text for value in returned for text in _messages(value, called, {})]
    if isinstance(node, ast.IfExp):
        return _messages(node.body, scope, functions) + _messages(node.orelse, scope, functions)
    return [_pattern(node)]


def _assigns(node: ast.Assign, name: str) -> bool:
    return any(isinstance(target, ast.Name) and target.id == name for target in node.targets)


def _pattern(node: ast.expr) -> str:
    """Return an expression that yields text as a pattern."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_pattern(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        value = node.value
        return "{" + ast.unparse(value).rpartition(".")[2] + "}" if _is_name(value) else _pattern(value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _pattern(node.left) + _pattern(node.right)
    return "{" + ast.unparse(node).rpartition(".")[2] + "}" if _is_name(node) else _COMPUTED


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_name(node.value))


def _cause(chain: list[ast.AST]) -> str:
    """Return the condition of the innermost ``if`` or ``except`` around a place, if it is short."""
    for inner, outer in pairwise(chain):
        if isinstance(outer, Function):
            break
        if isinstance(outer, ast.If):
            text = ast.unparse(outer.test)
            text = text if inner in outer.body else f"not ({text})"
        elif isinstance(outer, ast.ExceptHandler) and outer.type is not None:
            text = f"except {ast.unparse(outer.type)}"
        else:
            continue
        return text if len(text) <= _LONGEST_CONDITION else ""
    return ""


def _row(site: ErrorSite) -> str:
    cause = _code(site.cause) if site.cause else ""
    return f"| {_text(site.message)} | {cause} | `{site.module}` |"


def _text(message: str) -> str:
    """Return a message as text of a table: no markup, and one line."""
    plain = " ".join(message.split())
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>#|~" else letter for letter in plain)


def _code(source: str) -> str:
    """Return a piece of source text as code in a table."""
    fence = "``" if "`" in source else "`"
    return f"{fence}{source.replace('|', chr(92) + '|')}{fence}"
