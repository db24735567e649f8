"""The rewriting of one Python file."""

from __future__ import annotations

import ast
import re

import libcst as cst

from .bindings import Binding, bindings, imported_frameworks
from .calls import check_calls
from .edits import COMPOSER_PAGE, TRANSFORMERS_PAGE, Outcome, outermost
from .hooks import check_accelerators, check_methods
from .imports import ImportRewriter
from .names import Target, counterpart
from .source import Source

_OTHERS = {
    "composer": ("Composer", COMPOSER_PAGE),
    **dict.fromkeys(
        (
            "transformers.Seq2SeqTrainer",
            "transformers.Seq2SeqTrainingArguments",
            "transformers.Trainer",
            "transformers.TrainerCallback",
            "transformers.TrainingArguments",
        ),
        ("transformers' Trainer", TRANSFORMERS_PAGE),
    ),
}


# What each import of a known framework contains. To parse files that have none would take most of the time of a
# directory: libcst and its names take 3 s for 1,000 lines.
_IMPORT = re.compile(rb"\b(?:import|from)\b[^\n#]*\b(?:accelerate|composer|\w*lightning\w*|phalanx|transformers)\b")


class NotPython(ValueError):
    """A file that cannot be parsed; the message says where."""


def migrate_script(text: bytes, is_package_file: bool = False) -> Outcome:
    """Return the edits of a Python file and the lines that are left.

    Args:
        text: the content of the file.
        is_package_file: whether it is an ``__init__.py``, whose imported names other files may use.

    Raises:
        NotPython: the file cannot be parsed.
    """
    outcome = Outcome()
    try:
        if not _IMPORT.search(text.replace(b"\\\n", b" ")):
            ast.parse(text)
            return outcome
        source = Source(text)
    except (cst.ParserSyntaxError, SyntaxError, ValueError) as error:
        raise NotPython(_reason(text, error)) from error
    # A byte order mark stays at the start of the file.
    outcome.encoding = source.encoding.removesuffix("-sig")
    if frameworks := imported_frameworks(source):
        found = bindings(source, outcome)
        rewriter = ImportRewriter(source, found, outcome, is_package_file)
        _rename_in_strings(source, found, rewriter.new_names, outcome)
        check_calls(source, outcome)
        check_methods(source, frameworks, outcome)
        check_accelerators(source, outcome)
    _list_others(source, outcome)
    outcome.edits = outermost(outcome.edits)
    outcome.left.sort()
    return outcome


def _reason(text: bytes, error: Exception) -> str:
    """Return why a text was refused, with the line that Python itself names."""
    if isinstance(error, UnicodeDecodeError):
        return f"its text cannot be decoded: {error}"
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as own:
        error = own
    line = getattr(error, "lineno", None) or getattr(error, "raw_line", None)
    return f"line {line} is not valid Python" if line else f"it is not valid Python: {error}"


def _rename_in_strings(source: Source, found: list[Binding], renamed: dict[str, str], outcome: Outcome) -> None:
    """Rename imported names in annotations that are written as strings."""
    modules = {each.name: each.path for each in found if isinstance(each.target, Target) and each.target.is_module}

    def new_name(match: re.Match[str]) -> str:
        first, _, rest = match[0].partition(".")
        if first in renamed:
            return renamed[first] + match[0][len(first) :]
        target = counterpart(f"{modules[first]}.{rest}") if rest and first in modules else None
        return target.dotted if isinstance(target, Target) and not target.is_module else match[0]

    for annotation in source.walk(cst.Annotation):
        for string in _strings(annotation):
            old = source.code(string)
            new = re.sub(r"(?<![\w.])[A-Za-z_]\w*(?:\.\w+)*", new_name, old)
            if new != old:
                outcome.replace(source.span(string), new, source.line(string))


def _list_others(source: Source, outcome: Outcome) -> None:
    """Leave the first use of a framework whose programs are rewritten by hand."""
    used: dict[tuple[str, str], cst.Name | cst.Attribute] = {}
    for node in source.references():
        for path in source.imported_names(node):
            if found := _OTHERS.get(path) or _OTHERS.get(path.partition(".")[0]):
                used.setdefault(found, node)
    for (title, page), node in used.items():
        reason = f"programs of {title} are not rewritten: the page has the equivalent of each argument and method."
        outcome.leave(source.line(node), reason, page)


def _strings(node: cst.CSTNode) -> list[cst.SimpleString]:
    own = [node] if isinstance(node, cst.SimpleString) else []
    return own + [each for child in node.children for each in _strings(child)]
