"""Limits on the contract of a strategy and on reach, read from the source.

Each rule is a function over source text, tested below on a planted breach, and returns the breaches by module.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping

import pytest
from test_layers import package_sources, parsed

MAX_STRATEGY_METHODS = 20
MAX_TRAITS = 8
# Objects that hold most others: reaching through one of them ties the code to the whole structure.
HUBS = {"run", "trainer", "fabric"}
MAX_DOTS = 2

Function = ast.FunctionDef | ast.AsyncFunctionDef
Breaches = Mapping[str, set[str]]
"""What breaches a rule, by module."""

_DICT_WRITES = {"update", "pop", "popitem", "setdefault", "clear", "__setitem__", "__delitem__"}
NO_ORDINARY_WAY = "# No ordinary way:"


def large_contract(sources: Mapping[str, str]) -> Breaches:
    """``Strategy`` with more than 20 public methods, ``Traits`` with more than 8 fields."""

    def too_large(source: str) -> Iterator[str]:
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef) and node.name == "Strategy":
                names = [part.name for part in node.body if isinstance(part, Function)]
                if sum(not name.startswith("_") for name in names) > MAX_STRATEGY_METHODS:
                    yield "Strategy"
            if isinstance(node, ast.ClassDef) and node.name == "Traits":
                fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                if len(fields) > MAX_TRAITS:
                    yield "Traits"

    return _by_module(sources, too_large)


def _is_named(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def rewired_objects(sources: Mapping[str, str]) -> Breaches:
    """Writes into ``__dict__``, and ``__class__`` replaced, without a comment that begins with "No ordinary way:".

    The comment gives the reason why neither ``setattr`` nor a subclass does. It is directly above the write or on its
    line.
    """

    def unexplained(source: str) -> Iterator[str]:
        lines = source.splitlines()
        return (ast.unparse(part) for node, part in _rewired(parsed(source)) if not _is_explained(node, lines))

    return _by_module(sources, unexplained)


def _rewired(tree: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield each expression that writes, and the expression for the ``__dict__`` or ``__class__`` that it writes to."""
    for node in ast.walk(tree):
        stored = isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)
        if isinstance(node, ast.Attribute):
            if stored and node.attr in ("__dict__", "__class__"):
                yield node, node
            elif node.attr in _DICT_WRITES and _is_dict(node.value):
                yield node, node.value
        elif isinstance(node, ast.Subscript) and stored and _is_dict(node.value):
            yield node, node.value
        elif isinstance(node, ast.Call) and len(node.args) > 1 and _is_dunder(node.args[1]):
            name = node.args[1]
            assert isinstance(name, ast.Constant)
            yield node, ast.Attribute(node.args[0], str(name.value), ast.Load())


def _is_explained(node: ast.expr, lines: list[str]) -> bool:
    """Whether the line of an expression, or the comment directly above it, gives the reason for a write."""
    last = node.lineno - 1
    first = last
    while first > 0 and lines[first - 1].strip().startswith("#"):
        first -= 1
    return any(line.partition(NO_ORDINARY_WAY)[2].strip() for line in (lines[first], lines[last]))


def _is_dunder(node: ast.AST) -> bool:
    """Whether an expression is the name that ``setattr`` and ``object.__setattr__`` are called with."""
    return isinstance(node, ast.Constant) and node.value in ("__dict__", "__class__")


def _is_dict(node: ast.AST) -> bool:
    """Whether an expression is ``a.__dict__`` or ``vars(a)``."""
    if isinstance(node, ast.Call):
        return _is_named(node.func, {"vars"}) and bool(node.args)
    return isinstance(node, ast.Attribute) and node.attr == "__dict__"


def long_chains(sources: Mapping[str, str]) -> Breaches:
    """Three dots and more after ``run``, ``trainer`` or ``fabric``, such as ``run.x.y.z``."""

    def chains(source: str) -> Iterator[str]:
        tree = parsed(source)
        inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                names = _dotted(node)
                hubs = [index for index, name in enumerate(names) if name.lstrip("_") in HUBS]
                if hubs and len(names) - 1 - hubs[0] > MAX_DOTS:
                    yield ast.unparse(node)

    return _by_module(sources, chains)


def _dotted(node: ast.expr) -> list[str]:
    """Return the names of ``a.b.c`` in order; what is no name at its start is an empty one."""
    if isinstance(node, ast.Attribute):
        return [*_dotted(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def _by_module(sources: Mapping[str, str], breaches: Callable[[str], Iterable[str]]) -> Breaches:
    found = {name: set(breaches(source)) for name, source in sources.items()}
    return {name: names for name, names in found.items() if names}


@pytest.mark.parametrize("rule", [large_contract, rewired_objects, long_chains])
def test_nothing_breaches_the_rules(rule: Callable[[Mapping[str, str]], Breaches]) -> None:
    found = rule(package_sources())
    assert not found, f"{rule.__doc__} Found: {found}"


def test_a_planted_large_contract_is_found() -> None:
    methods = "".join(f"  def f{number}(self): ...\n" for number in range(20))
    traits = "".join(f"  a{number}: bool = False\n" for number in range(8))
    small = f"class Traits:\n{traits}class Strategy:\n  def _own(self): ...\n{methods}"
    assert not large_contract({"framework.a": small})
    large = f"class Traits:\n  b: int\n{traits}class Strategy:\n  def g(self): ...\n{methods}"
    assert large_contract({"framework.a": large}) == {"framework.a": {"Strategy", "Traits"}}


@pytest.mark.parametrize(
    "source",
    [
        "a.__dict__['b'] = 1",
        "del self.__dict__['b']",
        "a.b.__dict__.update(c)",
        "vars(a)['b'] = 1",
        "a.__class__ = B",
        "object.__setattr__(a, '__dict__', b)",
    ],
)
def test_a_planted_rewired_object_is_found(source: str) -> None:
    assert rewired_objects({"framework.a": source})


@pytest.mark.parametrize(
    "source",
    [
        "# No ordinary way: why\na.__dict__['b'] = 1",
        "# No ordinary way: a long\n# reason\na.__class__ = B",
        "if a:\n    # No ordinary way: why\n    del vars(a)['b']",
        "a.__class__ = B  # No ordinary way: why",
    ],
)
def test_an_explained_write_is_not_reported(source: str) -> None:
    assert not rewired_objects({"framework.a": source})


@pytest.mark.parametrize(
    "source",
    [
        "# No ordinary way:\na.__class__ = B",
        "# Why\na.__class__ = B",
        "# No ordinary way: why\n\na.__class__ = B",
        "# No ordinary way: why\na.__class__ = B\na.__dict__.clear()",
    ],
)
def test_a_write_without_a_reason_directly_above_is_found(source: str) -> None:
    assert rewired_objects({"framework.a": source})


def test_reads_of_an_object_are_not_reported() -> None:
    source = "a.__dict__['b']\na.__class__ is B\nvars(a).items()\na.__dict__.get('b')\nobject.__setattr__(a, 'b', 1)"
    assert not rewired_objects({"framework.a": source})


@pytest.mark.parametrize("source", ["run.x.y.z", "self._run.x.y.z(1)", "a.trainer.x.y.z", "f(fabric.x.y.z.w)"])
def test_a_planted_long_chain_is_found(source: str) -> None:
    assert long_chains({"framework.a": source})


def test_short_chains_are_not_reported() -> None:
    assert not long_chains({"framework.a": "run.x.y\na.b.c.d.e\nself.run.x.y(1)\nrunner.x.y.z"})
