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
    code = text[text.index('"""', 3) + 3 :].strip()
    lines = [f"# {recipe_title(file)}", "", _docstring(file), "", f'```python title="{name}"', code, "```"]
    for beside in _imports_beside(file):
        lines += ["", f"`{beside}` is [{recipe_title(file.with_name(f'{beside}.py'))}]({beside}.md)."]
    return WIDE + "\n".join(lines) + "\n"


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
