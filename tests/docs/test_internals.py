"""The page on internals names files and functions that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import phalanx

ROOT = Path(phalanx.__file__).parent
PAGE = (ROOT / "docs" / "internals.md").read_text(encoding="utf-8")
REFERENCE = re.compile(r"`([\w/]+\.py)::([\w.]+)`")
ENTRY = re.compile(r"^\d+\. .*(?:\n {2,}.*)*", re.MULTILINE)


@cache
def qualified_names(file: str) -> set[str]:
    """Return the names of the classes, methods and functions of a file; an empty set if there is no such file."""
    path = ROOT / file
    if not path.is_file():
        return set()
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def missing(text: str) -> list[str]:
    """Return the references of a text whose function does not exist."""
    return [f"{file}::{name}" for file, name in REFERENCE.findall(text) if name not in qualified_names(file)]


def test_every_function_on_the_page_exists() -> None:
    assert missing(PAGE) == []


def test_every_entry_names_a_function() -> None:
    entries = ENTRY.findall(PAGE)
    assert len(entries) > 40
    assert [entry for entry in entries if not REFERENCE.search(entry)] == []


def test_a_planted_reference_is_found() -> None:
    assert missing("`framework/no_such_file.py::f`") == ["framework/no_such_file.py::f"]
    assert missing("`framework/trainer/assembly.py::no_such_function`")
    assert not missing("`framework/trainer/assembly.py::assemble_fit`")
