"""A class is in one file: no base class is there only to hold a part of one other class."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

from test_layers import FOLDERS, ROOT, parsed


def parts(sources: Mapping[str, str]) -> set[str]:
    """Return classes that only one class mentions, as its base, in another file of the same folder."""
    homes: dict[str, str] = {}
    subclasses: dict[str, set[tuple[str, str]]] = defaultdict(set)
    mentions: Counter[str] = Counter()
    for path, source in sources.items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                homes[node.name] = path
                for base in node.bases:
                    subclasses[ast.unparse(base).partition("[")[0]].add((path, node.name))
            elif isinstance(node, ast.Name):
                mentions[node.id] += 1
            elif isinstance(node, ast.Attribute):
                mentions[node.attr] += 1
    return {
        f"{name} of {homes[name]} is a part of {child}"
        for name, found in subclasses.items()
        if name in homes and len(found) == 1 and mentions[name] == 1
        for path, child in found
        if path != homes[name] and Path(path).parent == Path(homes[name]).parent
    }


def test_no_class_is_in_several_files() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert not parts({str(path.relative_to(ROOT)): Path(path).read_text() for path in files})


def test_a_planted_part_is_found() -> None:
    whole = "from a import Part\nclass Whole(Part): ..."
    assert parts({"a.py": "class Part: ...", "b.py": whole}) == {"Part of a.py is a part of Whole"}
    assert not parts({"a.py": "class Part: ...", "b.py": whole, "c.py": "from a import Part\nPart()"})
    assert not parts({"a.py": "class Part: ...\nclass Whole(Part): ..."})
