"""The layout of docstrings: one line for each argument, items of lists that begin their own line, whole paragraphs.

Each rule is a function over a docstring, and is tested on planted breaches, most of which automatic re-wrapping makes.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent
FOLDERS = ("framework", "strategies", "precisions", "callbacks", "loggers", "cli", "examples", "benchmarks", "docs")
CODE = [*sorted(ROOT.glob("*.py")), *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]

SECTIONS = ("Args", "Attributes", "Raises")
ENTRY = re.compile(r"\*{0,2}[\w.]+(, [\w.]+)*:(\s|$)")
ITEM = re.compile(r"(\s*)(?:- |\d+\. )\S")
# A line that holds nothing but one of these was torn out of a sentence.
FUNCTION_WORDS = re.compile(
    "(a|an|and|are|as|at|be|been|by|can|for|from|has|if|in|into|is|it|its|may|must|not|of|on|only|or|than|that|the|"
    "their|then|they|this|to|was|were|when|which|while|with)",
    re.IGNORECASE,
)


def comments(source: str) -> Iterator[str]:
    """Yield comments, those of consecutive lines as one text."""
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != block[-1][0] + 1:
                yield "\n".join(text for _, text in block)
                block = []
            block.append((token.start[0], token.string.lstrip("#")))
    if block:
        yield "\n".join(text for _, text in block)


def section(docstring: str, title: str) -> list[str]:
    """Return the lines of a section of a docstring, without their common indentation."""
    match = re.search(rf"^{title}:\n((?:[ ]+\S.*\n?|\n)*)", docstring + "\n", re.MULTILINE)
    return inspect.cleandoc("\n" + match[1]).splitlines() if match else []


def misplaced_entries(docstring: str, names: set[str]) -> list[str]:
    """Return lines of ``Args`` and similar sections that are no entry, or in which a second entry begins.

    Args:
        docstring: The docstring, without indentation.
        names: The names of the parameters.
    """
    found = []
    for title in SECTIONS:
        for line in section(docstring, title):
            starts = line[:1].strip() != ""
            second = any(match[1] in names for match in re.finditer(r"[.)] (\w+):(?=\s|$)", line))
            if (starts and not ENTRY.match(line)) or second:
                found.append(line)
    return found


def torn_lines(text: str) -> list[str]:
    """Return lines that consist of one function word."""
    return [line for line in text.splitlines() if FUNCTION_WORDS.fullmatch(line.strip())]


def broken_items(docstring: str) -> list[str]:
    """Return continuation lines of list items that are not indented, and lines in which a second item begins."""
    lines = docstring.splitlines()
    found = [line for line in lines if re.search(r"[.;:] \d+\. [A-Z]", line)]
    for item, following in pairwise(lines):
        match = ITEM.match(item)
        if match and following.strip() and not ITEM.match(following):
            indentation = len(following) - len(following.lstrip())
            if indentation <= len(match[1]):
                found.append(following)
    return found


def docstrings(source: str) -> Iterator[tuple[str, set[str]]]:
    """Yield every docstring and the names of the parameters that it may describe."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if (text := ast.get_docstring(node)) is None:
            continue
        parts = node.body if isinstance(node, ast.ClassDef) else [node]
        functions = [part for part in parts if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
        names = {each.arg for function in functions for each in ast.walk(function.args) if isinstance(each, ast.arg)}
        yield text, names


def breaches(path: Path) -> list[str]:
    """Return the breaches of a file as ``file: line``."""
    source = path.read_text(encoding="utf-8")
    found = [
        line
        for text, names in docstrings(source)
        for line in [*misplaced_entries(text, names), *torn_lines(text), *broken_items(text)]
    ]
    # Few sources have a line that may be torn, and it takes long to find the comments of one.
    if any(torn_lines(line.rpartition("#")[2]) for line in source.splitlines() if "#" in line):
        found += [line for comment in comments(source) for line in torn_lines(comment)]
    return [f"{path.relative_to(ROOT)}: {line.strip()}" for line in found]


def test_docstrings_are_laid_out_well() -> None:
    found = [each for path in CODE for each in breaches(path)]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "planted",
    [
        "Run.\n\nArgs:\n    first: The first, and any\n    value. second: The second.\n    third: The third.",
        "Run.\n\nArgs:\n    first: The first. second: The second.",
        "Run.\n\nArgs:\n    first: The first, which\n    others need.",
    ],
)
def test_planted_entries_that_share_a_line_are_found(planted: str) -> None:
    assert misplaced_entries(planted, {"first", "second", "third"})


def test_planted_torn_lines_are_found() -> None:
    assert torn_lines("It waits, so\nthat\n    the cause is known.") == ["that"]
    assert not torn_lines("It waits, so that\nthe cause is known\nbackward\n")


def test_planted_broken_items_are_found() -> None:
    assert broken_items("1. First, which\ncontinues.") == ["continues."]
    assert broken_items("4. The rest is\n   killed. 5. The end.") == ["   killed. 5. The end."]
    assert not broken_items("1. First, which\n   continues in epoch 5. Then it ends.\n2. Second.\n\nNo item.")


def test_entries_in_their_own_lines_pass() -> None:
    text = "Run.\n\nArgs:\n    first: The first. Default: none.\n        A second line.\n    *rest: More.\n\nDone."
    assert not misplaced_entries(text, {"first", "rest"})
