"""Pages of the API: one for each module with its functions, and one for each class.

mkdocstrings renders the docstrings; which names there are is read from the ``_HOMES`` of packages.

mkdocstrings searches a package in its folder. The checkout is the package itself, and holds tests and environments
too, so ``link_package`` makes a folder ``phalanx`` that has links to the parts of the package alone.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

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


# The modules of a name in an annotation.
_QUALIFIED = re.compile(r"\b(?:\w+\.)+(?=\w)")


class Target(NamedTuple):
    """A public name."""

    name: str
    """The full name of the object, by the module that defines it."""
    page: str
    """The address of the source of its page."""
    is_class: bool
    summary: str
    """The first line of its docstring, as Markdown."""
    arguments: tuple[str, ...] = ()
    """The lines of a table of the arguments of a class, if its source does not list them."""


def module_entries() -> list[Entry]:
    """Return the entries of the pages of modules."""
    return [Entry(name, _page(name), contents) for name, contents in MODULES.items()]


def class_entries(module: str, root: Path) -> list[Entry]:
    """Return the entries of the pages of classes that the page of a module lists first."""
    found = [each for each in _targets(root)[module] if each.page == _page(module, each)]
    return [Entry(each.name.rpartition(".")[2], each.page, each.summary) for each in found if each.is_class]


def api_pages(root: Path) -> dict[str, str]:
    """Return the Markdown of all pages of the API, by the addresses of their sources."""
    pages = {}
    for module, targets in _targets(root).items():
        classes = [each for each in targets if each.is_class]
        rows = [f"| [`{each.name.rpartition('.')[2]}`]({Path(each.page).name}) | {each.summary} |" for each in classes]
        table = ["| class | |", "|---|---|", *rows, ""] if rows else []
        rest = [line for each in targets if not each.is_class for line in (_described(each, module), "")]
        pages[_page(module)] = "\n".join([f"# {module}", "", f"{MODULES[module]}.", "", *table, *rest])
        for each in classes:
            name = each.name.rpartition(".")[2]
            pages[each.page] = "\n".join([f"# {name}", "", *each.arguments, f"::: {each.name}", ""])
    return pages


def _page(module: str, target: Target | str | None = None) -> str:
    name = target.name if isinstance(target, Target) else target
    return f"api/{module}.{name.rpartition('.')[2]}.md" if name else f"api/{module}.md"


def _described(target: Target, module: str) -> str:
    """Return the directive for a function; a link if an earlier module has it."""
    here = _page(module)
    name = target.name.rpartition(".")[2]
    return f"::: {target.name}" if target.page == here else f"[`{name}`]({Path(target.page).name}#{target.name})"


@lru_cache
def _targets(root: Path) -> dict[str, list[Target]]:
    """Return what each module exports, by name; the page of a name is that of the first module which exports it."""
    found: dict[str, list[Target]] = {}
    pages: dict[str, str] = {}
    for module in MODULES:
        homes = public_names(_file_of(module, root))
        found[module] = []
        for public in sorted(homes, key=str.lower):
            home = _absolute(homes[public], module, root)
            defined = _class_of(home, public, root)
            name = f"{home}.{public}"
            page = pages.setdefault(name, _page(module, name) if defined else _page(module))
            found[module].append(Target(name, page, defined is not None, _summary(defined), _arguments(home, defined)))
    return found


def _class_of(home: str, name: str, root: Path) -> ast.ClassDef | None:
    """Return the definition of a class; None for any other object."""
    body = ast.parse(_file_of(home, root).read_text(encoding="utf-8")).body
    return next((node for node in body if isinstance(node, ast.ClassDef) and node.name == name), None)


def _arguments(home: str, defined: ast.ClassDef | None) -> tuple[str, ...]:
    """Return the table of the arguments of a class that takes the fields of another one."""
    methods = [node for node in (defined.body if defined else ()) if isinstance(node, ast.FunctionDef)]
    constructor = next((node for node in methods if node.name == "__init__"), None)
    if (
        defined is None
        or constructor is None
        or not any("takes(" in ast.unparse(each) for each in constructor.decorator_list)
    ):
        return ()
    made = getattr(import_module(home), defined.name).__init__
    described = dict(re.findall(r"^    (\w+): (.+)$", made.__doc__, re.MULTILINE))
    rows = []
    for name, parameter in list(inspect.signature(made).parameters.items())[1:]:
        given = _QUALIFIED.sub("", inspect.formatannotation(parameter.annotation))
        cells = (f"`{name}`", f"`{given}`", f"`{parameter.default!r}`", described[name].replace("``", "`"))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return ("## Arguments", "", "| argument | type | default | |", "|---|---|---|---|", *rows, "")


def _summary(defined: ast.ClassDef | None) -> str:
    text = (ast.get_docstring(defined) if defined else None) or ""
    first = " ".join(text.partition("\n\n")[0].split())
    return first.replace("``", "`").replace("|", "\\|") or "without a description"


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
