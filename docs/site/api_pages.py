"""Pages of the API. mkdocstrings renders the docstrings; which names there are is read from the ``_HOMES`` of packages.

mkdocstrings searches a package in its folder. The checkout is the package itself, and holds tests and environments
too, so ``link_package`` makes a folder ``phalanx`` that has links to the parts of the package alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib.util import resolve_name
from pathlib import Path

from page_index import Entry

# The public modules, with the contents of their pages.
MODULES = {
    "phalanx": "`Trainer`, `TrainModule`, `Fabric`, `DataModule`, `Callback` and functions",
    "phalanx.strategies": "the classes of strategies and their settings",
    "phalanx.precisions": "the classes of precisions",
    "phalanx.callbacks": "all callbacks",
    "phalanx.loggers": "all loggers",
    "phalanx.hf": "models of transformers",
    "phalanx.profilers": "profilers of a fit",
    "phalanx.checkpoint": "functions for checkpoints on disk",
    "phalanx.errors": "the exceptions",
    "phalanx.registry": "the names of plug-ins",
}


def api_entries() -> list[Entry]:
    """Return the entries of the pages of the API."""
    return [Entry(name, f"api/{name}.md", contents) for name, contents in MODULES.items()]


def api_page(name: str, root: Path) -> str:
    """Return the page of a module: a directive for each public name, a link for one that an earlier page describes."""
    lines = [f"# {name}", "", f"Names that `{name}` exports: {MODULES[name]}.", ""]
    for target in _targets(name, root):
        first = next(module for module in MODULES if target in _targets(module, root))
        here = f"::: {target}" if first == name else f"[`{target.rpartition('.')[2]}`]({first}.md#{target})"
        lines += [here, ""]
    return "\n".join(lines)


def _targets(name: str, root: Path) -> list[str]:
    """Return the full names of the objects that a module exports, in alphabetical order."""
    homes = public_names(_file_of(name, root))
    return [f"{_absolute(homes[public], name, root)}.{public}" for public in sorted(homes, key=str.lower)]


def public_names(file: Path) -> dict[str, str]:
    """Return the public names of a module, each with the module that defines it as the source writes it.

    Sub-modules, which a package exports under ".", are left out.
    """
    found: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            homes: dict[str, str] = ast.literal_eval(node.value)
            found |= {name: home for home, names in homes.items() if home != "." for name in names.split()}
    return found


def link_package(root: Path, parts: Iterable[Path]) -> None:
    """Make ``build/package/phalanx`` with a link to each part of the package, where mkdocstrings finds it."""
    folder = root / "build" / "package" / "phalanx"
    folder.mkdir(parents=True, exist_ok=True)
    for part in parts:
        link = folder / part.name
        if not link.is_symlink():
            link.symlink_to(part)


def _file_of(name: str, root: Path) -> Path:
    path = root.joinpath(*name.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _absolute(home: str, name: str, root: Path) -> str:
    """Return the absolute name of a module that the source of ``name`` gives relative to its package."""
    is_package = _file_of(name, root).name == "__init__.py"
    return resolve_name(home, name if is_package else name.rpartition(".")[0])
