"""Who may import whom, read from the source itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

import phalanx

ROOT = Path(phalanx.__file__).parent
PLUGINS = ("strategies", "precisions", "callbacks", "loggers")
FOLDERS = ("framework", *PLUGINS, "cli", "compat")
FACES = ("__init__", "checkpoint", "configuration", "errors", "hf", "profilers", "registry")

# The sub-packages of framework, in order: each may import those named here, all of which stand above it.
ROOMS: dict[str, str] = {
    "core": "",
    "system": "core",
    "storage": "core system",
    "distributed": "core system",
    "metrics": "core system storage distributed",
    "checkpoint": "core system storage distributed metrics",
    "data": "core system distributed",
    "report": "core system storage distributed checkpoint data",
    "parallel": "core system distributed checkpoint",
    "state": "core system distributed checkpoint parallel",
    "pretrained": "core system storage distributed checkpoint parallel state",
    "window": "core parallel",
    "watchdog": "core system distributed",
    "launch": "core system distributed checkpoint data watchdog report",
    "profiling": "core system distributed metrics",
    "fabric": "core system distributed metrics checkpoint parallel data state pretrained watchdog launch window",
    "api": "core distributed metrics checkpoint parallel state pretrained profiling fabric",
    "memory": "core parallel api",
    "run": "core system distributed metrics checkpoint parallel data state watchdog profiling fabric api",
    "rehearsal": "core parallel window api memory run",
    "diagnostics": "core system distributed metrics checkpoint parallel api run",
    "resume": "core system storage distributed checkpoint parallel data state pretrained launch api run report",
    "loop": "core distributed metrics parallel data state window watchdog profiling api run diagnostics resume",
    "trainer": "core system storage distributed metrics checkpoint parallel data state pretrained watchdog launch "
    "profiling fabric api "
    "memory run rehearsal diagnostics resume loop report",
    "configuration": "core system distributed metrics parallel launch api run trainer",
    "huggingface": "core api system distributed checkpoint parallel pretrained resume trainer",
}
Import = tuple[str, int, bool]
"""The dotted name below ``phalanx`` that is imported, the line, and whether it stands inside a function."""


@cache
def package_sources() -> dict[str, str]:
    """Return the source of every module of the package by its dotted name below ``phalanx``."""
    faces = [ROOT / f"{name}.py" for name in FACES]
    paths = [*faces, *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py")))]
    return {module_name(path.relative_to(ROOT)): path.read_text() for path in paths}


@cache
def parsed(source: str) -> ast.Module:
    """Return the tree of a source, which several rules look at."""
    return ast.parse(source)


def dotted_name(node: ast.AST) -> str:
    """Return the text of ``a.b.c``. What is no name at its start is left out, as in ``.c`` for ``a().c``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def module_name(path: Path) -> str:
    """Return ``framework.a.b`` for ``framework/a/b.py``, and ``framework.__init__`` for the folder itself."""
    return ".".join(path.with_suffix("").parts)


@cache
def imports(name: str, source: str) -> list[Import]:
    """Return the imports of phalanx's own modules, those for type checkers alone included."""

    def walk(node: ast.AST, inside: bool) -> Iterator[Import]:
        inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.ImportFrom):
            for target in targets(name, node):
                yield target, node.lineno, inside
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "phalanx":
                    yield alias.name.partition(".")[2], node.lineno, inside
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return list(walk(parsed(source), False))


def targets(name: str, node: ast.ImportFrom) -> list[str]:
    """Return what an import statement may load: ``from .a import b`` names ``a.b``, module or not."""
    module = node.module.split(".") if node.module else []
    if node.level:
        stem = [*name.split(".")[: -node.level], *module]
    elif module[0] == "phalanx":
        stem = module[1:]
    else:
        return []
    return [".".join([*stem, alias.name]) for alias in node.names]


def layer_breaches(sources: Mapping[str, str]) -> list[str]:
    """A plug-in's folder imports from framework and itself, framework from itself; nobody a face or an alias."""
    found = []
    for name, source in sources.items():
        folder = name.split(".")[0]
        allowed = {"framework", folder}
        for target, line, _ in imports(name, source):
            if name not in FACES and folder not in ("cli", "compat") and target.split(".")[0] not in allowed:
                found.append(f"{name}:{line} imports {target}")
    return found


def graph(sources: Mapping[str, str], folder: str) -> dict[str, set[str]]:
    """Return which modules of a folder each of them imports."""
    modules = {name for name in sources if name.startswith(f"{folder}.")}
    edges: dict[str, set[str]] = {}
    for name in modules:
        edges[name] = set()
        for target, _, _ in imports(name, sources[name]):
            for candidate in (target, target.rpartition(".")[0]):
                if candidate in modules and candidate != name:
                    edges[name].add(candidate)
                    break
    return edges


def room_of(module: str) -> str:
    return module.split(".")[1]


def order_breaches(edges: Mapping[str, set[str]], rooms: Mapping[str, str]) -> set[str]:
    """Return the imports between sub-packages of framework that the table does not allow."""
    found = set()
    for name, targets in edges.items():
        for target in targets:
            here, there = room_of(name), room_of(target)
            if here != there and there not in rooms.get(here, "").split():
                found.add(f"{name} imports {target}")
    return found


def circle(edges: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one import circle in order, or an empty list."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(edges.get(name, ())):
            if found := visit(target, [*path, name]):
                return found
        done.add(name)
        return []

    for start in sorted(edges):
        if found := visit(start, []):
            return found
    return []


def hidden_imports(sources: Mapping[str, str]) -> list[str]:
    """Imports of phalanx's own modules inside a function, where they would hide a circle."""
    return [
        f"{name}:{line} imports {target} inside a function"
        for name, source in sources.items()
        for target, line, inside in imports(name, source)
        if inside
    ]


def test_plugins_import_framework_only_and_framework_no_plugin() -> None:
    assert not layer_breaches(package_sources())


def test_every_room_may_import_rooms_above_it_alone() -> None:
    order = list(ROOMS)
    assert set(order) == {path.parent.name for path in (ROOT / "framework").glob("*/__init__.py")}
    for index, (room, allowed) in enumerate(ROOMS.items()):
        assert set(allowed.split()) <= set(order[:index]), room


def test_rooms_import_in_order() -> None:
    assert order_breaches(graph(package_sources(), "framework"), ROOMS) == set()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_has_no_import_circle(folder: str) -> None:
    found = circle(graph(package_sources(), folder))
    assert not found, " -> ".join(found)


def test_no_own_import_hides_inside_a_function() -> None:
    assert not hidden_imports(package_sources())


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("callbacks.timer", "from ..strategies.ddp import DDPStrategy"),
        ("loggers.csv_file", "import phalanx.callbacks.timer"),
        ("strategies.ddp", "from .. import Trainer"),
        ("framework.trainer.trainer", "def f():\n    from ...callbacks import Timer"),
        ("framework.a", "if TYPE_CHECKING:\n    from ..callbacks.timer import Timer"),
    ],
)
def test_a_planted_breach_of_the_layers_is_found(name: str, source: str) -> None:
    assert layer_breaches({name: source})


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("callbacks.__init__", "from .timer import Timer"),
        ("callbacks.timer", "from ..framework.api.callback import Callback"),
        ("loggers.csv_file", "from .file_logger import FileLogger"),
        ("framework.trainer.trainer", "from .world import World"),
        ("loggers.tensorboard", "def f():\n    from torch.utils.tensorboard import SummaryWriter"),
    ],
)
def test_what_the_layers_allow_is_not_reported(name: str, source: str) -> None:
    assert not layer_breaches({name: source})
    assert not hidden_imports({name: source})


def test_a_planted_circle_is_found() -> None:
    sources = {
        "framework.a": "from .b import B",
        "framework.b": "from . import c",
        "framework.c": "def f():\n    from .a import A",
    }
    assert circle(graph(sources, "framework")) == ["framework.a", "framework.b", "framework.c", "framework.a"]


def test_a_circle_for_type_checkers_alone_is_found() -> None:
    sources = {"framework.a": "from .b import B", "framework.b": "if TYPE_CHECKING:\n    from .a import A"}
    assert circle(graph(sources, "framework"))


@pytest.mark.parametrize("source", ["from ..run.run import Run", "if TYPE_CHECKING:\n    from ..run import run"])
def test_a_planted_import_against_the_order_is_found(source: str) -> None:
    sources = {"framework.data.a": source, "framework.run.run": ""}
    assert order_breaches(graph(sources, "framework"), ROOMS) == {"framework.data.a imports framework.run.run"}


def test_a_planted_hidden_import_is_found() -> None:
    assert hidden_imports({"framework.a": "class A:\n    def f(self):\n        from .b import B"})
