"""Pages of files outside ``docs/``: recipes and examples with their code, and Markdown files that a page links to.

The page of a file has the file's path with the suffix ``.md``, and that of a folder is its ``index.md``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from page_index import WIDE, Entry

# The rest of a link after "](": a path that leaves docs/, and possibly an anchor.
LINK_OUT = re.compile(r"\]\(\.\./(?P<path>[^)#]+)(?P<anchor>#[^)]*)?\)")

# The beginning of a link from a file outside docs/ to a page of it.
_LINK_IN = re.compile(r"\]\((?P<up>(\.\./)*)docs/")


def page_of(path: str) -> str:
    """Return the source of the page of a file or folder; both are relative, to the repository and to ``docs/``."""
    file = Path(path)
    return file.with_suffix(".md").as_posix() if file.suffix else f"{file.as_posix()}/index.md"


def linked_pages(markdown: str) -> str:
    """Return the text of a page of ``docs/`` with links to files outside it replaced by links to their pages."""
    return LINK_OUT.sub(lambda link: f"]({page_of(link['path'])}{link['anchor'] or ''})", markdown)


def recipe_title(file: Path) -> str:
    """Return the title of a Python file: its docstring up to a colon or the end of the first sentence."""
    return re.split(r":\s|\.\s|\.$", _docstring(file), maxsplit=1, flags=re.MULTILINE)[0]


def entry_of(file: Path, root: Path) -> Entry:
    """Return the title, page and contents of a Python file."""
    summary = _docstring(file).partition("\n\n")[0]
    contents = " ".join(summary.removeprefix(f"{recipe_title(file)}:").split()).rstrip(".")
    return Entry(recipe_title(file), page_of(file.relative_to(root).as_posix()), contents)


def source_page(file: Path, root: Path) -> str:
    """Return the page of a file: its docstring and its code, or the Markdown that it holds."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return _LINK_IN.sub(r"](\g<up>", text)
    name = file.relative_to(root).as_posix()
    lines = [f"# {recipe_title(file)}", "", _docstring(file), "", f'```python title="{name}"', whole_code(file), "```"]
    for beside in _imports_beside(file):
        title = recipe_title(file.with_name(f"{beside}.py"))
        lines += ["", f"In the repository, the parts that recipes share are in [{title}]({beside}.md)."]
    return WIDE + "\n".join(lines) + "\n"


def whole_code(file: Path) -> str:
    """Return the code of a file with what it imports from the files beside it, so that it runs when it is pasted."""
    text = file.read_text(encoding="utf-8")
    lines, tree = text.splitlines(), ast.parse(text)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    known = {(_module(node), each.name) for node in imports for each in node.names}
    first = min(node.lineno for node in imports)
    added: list[str] = []
    definitions: list[str] = []
    left = lines[first - 1 : imports[-1].end_lineno]
    for node in reversed(imports):
        beside = file.with_name(f"{_module(node)}.py")
        if beside.is_file():
            del left[node.lineno - first : (node.end_lineno or node.lineno) - first + 1]
            more, parts = _parts(beside, {each.name for each in node.names}, known)
            added, definitions = more + added, parts + definitions
    rest = lines[imports[-1].end_lineno :]
    return "\n".join([*left, *added, *(line for part in definitions for line in ("", "", part)), *rest]).strip()


def _parts(file: Path, names: set[str], known: set[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Return the imports, but for the known ones, and the definitions that names of a file need."""
    text = file.read_text(encoding="utf-8")
    lines, body = text.splitlines(), ast.parse(text).body
    definitions = {name: node for node in body for name in _defined(node)}
    needed, used = set(names), set[str]()
    while needed - used:
        name = next(iter(needed - used))
        used.add(name)
        if name in definitions:
            needed |= {each.id for each in ast.walk(definitions[name]) if isinstance(each, ast.Name)}
    imports = []
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            given = [each for each in node.names if (each.asname or each.name) in used]
            new = [each for each in given if (_module(node), each.name) not in known]
            if new:
                node.names = new
                imports.append(ast.unparse(node))
    found = [node for node in body if used & set(_defined(node))]
    return imports, ["\n".join(lines[_first_line(node, lines) - 1 : node.end_lineno]) for node in found]


def _module(node: ast.Import | ast.ImportFrom) -> str:
    return (node.module or "") if isinstance(node, ast.ImportFrom) else ""


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines, but for imports."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return []


def _first_line(node: ast.stmt, lines: list[str]) -> int:
    """Return the line in which a definition begins, with its decorators and the comment above it."""
    line: int = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    while line > 1 and lines[line - 2].startswith("#"):
        line -= 1
    return line


def folder_page(title: str, text: str, entries: Iterable[Entry]) -> str:
    """Return a page that lists the pages of a folder."""
    rows = [f"| [{each.title}]({Path(each.path).name}) | {each.contents} |" for each in entries]
    return "\n".join([f"# {title}", "", text, "", "| page | shows |", "|---|---|", *rows, ""])


def _imports_beside(file: Path) -> list[str]:
    """Return the names of the files in its folder that a Python file imports from."""
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    names = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return sorted(name for name in names if file.with_name(f"{name}.py").is_file())


def _docstring(file: Path) -> str:
    """Return the docstring of a Python file as Markdown."""
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or file.stem).replace("``", "`")
