"""Rules of the house that no linter knows, read from the source itself."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from test_layers import dotted_name, parsed

import phalanx
from phalanx.framework.core.registry import STRATEGIES

ROOT = Path(phalanx.__file__).parent
FOLDERS = ("framework", "strategies", "precisions", "callbacks", "loggers", "cli")
CODE = [
    ROOT / "__init__.py",
    ROOT / "checkpoint.py",
    *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))),
]
AROUND = [
    path for folder in ("tests", "examples", "benchmarks", "docs") for path in sorted((ROOT / folder).rglob("*.py"))
]

ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
UNPICKLING = {
    "torch.load",
    "yaml.load",
    "yaml.unsafe_load",
    "joblib.load",
    *(f"{module}.{name}" for module in ("pickle", "cloudpickle", "dill") for name in ("load", "loads", "Unpickler")),
}
# The second is run by its path, where nothing of phalanx can be imported, and takes over a rank's variables.
READS_ENVIRONMENT = {"framework/system/environment.py", "framework/launch/fork_server_main.py"}
# What they load comes from another process of the run, and not from a disk.
PICKLES_BETWEEN_OWN_PROCESSES = {
    "framework/distributed/lone_rank.py",
    "framework/distributed/object_frames.py",
    "framework/launch/fork_launcher.py",
}
OF_OWN_PROCESSES = "pickle.loads"
# Foreign checkpoints are read by closed lists of names, and unpickled freely where the user trusts them.
READS_FOREIGN_PICKLES = {"framework/checkpoint/convert/pickles.py"}


def uses(source: str, forbidden: set[str]) -> list[str]:
    """Return where a source uses one of the dotted names, under whatever name it imported them."""
    return [f"line {line}: {name}" for line, name in names_of(source) if name in forbidden]


@cache
def names_of(source: str) -> list[tuple[int, str]]:
    """Return every name and dotted name in the expressions of a source, under the name of its origin, and the line.

    The name of what was not imported is that of a builtin if it has no dots, as in ``builtins.eval``.
    """
    tree = parsed(source)
    aliases = dict(imported(tree))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            head, _, rest = dotted_name(node).partition(".")
            origin = aliases.get(head, head if rest else f"builtins.{head}")
            found.append((node.lineno, f"{origin}.{rest}" if rest else origin))
    return found


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each local name that an import binds, and what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name if alias.asname else alias.name.split(".")[0]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def strategy_questions(source: str) -> list[str]:
    """Return where a source asks for the class or name of a strategy. ``Strategy`` itself is the contract."""
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Compare) and _constants(node) & set(STRATEGIES.built_in):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass") and len(node.args) > 1:
            asked: list[ast.AST] = [node.args[1]]
        elif isinstance(node, ast.Compare) and "type(" in ast.unparse(node):
            asked = list(node.comparators)
        else:
            continue
        names = {ast.unparse(part).rpartition(".")[2] for value in asked for part in ast.walk(value)}
        if any(name.endswith("Strategy") and name != "Strategy" for name in names):
            found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


def _constants(node: ast.AST) -> set[str]:
    constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def lacks_future_annotations(source: str) -> bool:
    """Whether a source that holds any statement does not begin with ``from __future__ import annotations``."""
    body = parsed(source).body
    statements = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    first = statements[0] if statements else None
    return first is not None and ast.unparse(first) != "from __future__ import annotations"


def shadows_the_standard_library(path: Path) -> bool:
    """Whether a file or folder is called like a module of the standard library, such as ``csv.py``."""
    return path.stem in sys.stdlib_module_names and path.stem != "__init__"


def report(paths: list[Path], forbidden: set[str], exempt: set[str]) -> list[str]:
    relative = {path: path.relative_to(ROOT).as_posix() for path in paths}
    return [
        f"{name} {use}"
        for path, name in relative.items()
        if name not in exempt
        for use in uses(path.read_text(), forbidden)
    ]


def test_one_module_touches_the_environment() -> None:
    assert not report(CODE, ENVIRONMENT, READS_ENVIRONMENT)


def test_nothing_unpickles() -> None:
    assert not report(CODE, UNPICKLING - {OF_OWN_PROCESSES}, READS_FOREIGN_PICKLES)
    assert not report(CODE, {OF_OWN_PROCESSES}, PICKLES_BETWEEN_OWN_PROCESSES | READS_FOREIGN_PICKLES)


def test_only_strategies_check_the_class_of_a_strategy() -> None:
    outside = [path for path in CODE if path.relative_to(ROOT).parts[0] != "strategies"]
    found = [f"{path.relative_to(ROOT)} {use}" for path in outside for use in strategy_questions(path.read_text())]
    assert not found


def test_modules_begin_with_future_annotations() -> None:
    # The templates of projects are copied to users, who write for their own version of Python.
    files = [path for path in [*CODE, *AROUND] if ROOT / "cli" / "templates" not in path.parents]
    assert not [str(path.relative_to(ROOT)) for path in files if lacks_future_annotations(path.read_text())]


def test_no_file_is_called_like_the_standard_library() -> None:
    assert not [str(path.relative_to(ROOT)) for path in CODE if shadows_the_standard_library(path)]


def test_tests_form_no_package() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['A']",
        "import os as system\nsystem.getenv('A')",
        "from os import environ\nenviron.get('A')",
        "def f():\n    from os import environ as e\n    return e",
    ],
)
def test_a_planted_look_at_the_environment_is_found(source: str) -> None:
    assert uses(source, ENVIRONMENT)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load('f', weights_only=True)",
        "from torch import load\nload('f')",
        "import pickle\npickle.loads(b'')",
        "from pickle import Unpickler as U\nU(f)",
        "import yaml\nyaml.load('')",
    ],
)
def test_a_planted_unpickling_is_found(source: str) -> None:
    assert uses(source, UNPICKLING)


def test_harmless_neighbours_are_not_reported() -> None:
    source = "import os, torch, json\nos.path.join('a')\ntorch.save({}, 'f')\njson.load(f)\nself.load('a')\nload('a')"
    assert not uses(source, ENVIRONMENT | UNPICKLING)


@pytest.mark.parametrize(
    "source",
    [
        "isinstance(strategy, DDPStrategy)",
        "isinstance(strategy, (int, strategies.FSDPStrategy))",
        "isinstance(strategy, DDPStrategy | FSDPStrategy)",
        "type(strategy) is DDPStrategy",
        "strategy.name == 'ddp'",
        "name in ('zero1', 'zero2')",
    ],
)
def test_a_planted_question_for_a_strategys_class_is_found(source: str) -> None:
    assert strategy_questions(source)


def test_the_contract_itself_may_be_asked_for() -> None:
    assert not strategy_questions("isinstance(given, Strategy)\nisinstance(given, str)")


def test_planted_faults_of_form_are_found() -> None:
    assert lacks_future_annotations('"""A module."""\nimport os\n')
    assert not lacks_future_annotations('"""A module."""\n\nfrom __future__ import annotations\n')
    assert not lacks_future_annotations('"""A module that holds nothing."""\n')
    assert shadows_the_standard_library(Path("loggers/csv.py"))
    assert not shadows_the_standard_library(Path("loggers/csv_file.py"))
