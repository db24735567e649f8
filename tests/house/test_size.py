"""Limits on size, branching and reach, read from the source. Breaches that still exist are listed in known_breaches.py.

Each rule is a function over source text, tested below on a planted breach, and gives what breaches it by module. The
lists may only get shorter: an entry that no longer names a breach has to be removed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache

import known_breaches
import pytest
import torch
from test_layers import package_sources

MAX_FILE_LINES = 300
MAX_BODY_LINES = 40
MAX_BRANCHES = 15
MAX_STRATEGY_METHODS = 20
MAX_TRAITS = 8
# Objects that hold most others: reaching through one of them ties the code to the whole structure.
HUBS = {"run", "trainer", "fabric"}
MAX_DOTS = 2

Function = ast.FunctionDef | ast.AsyncFunctionDef
Breaches = Mapping[str, set[str]]
"""What breaches a rule, by module."""

_BRANCHING = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.BoolOp,
    ast.comprehension,
    ast.match_case,
)
# What a function may write to; the last is the context of an autograd function.
_OWN = {"self", "cls", "ctx"}
_DICT_WRITES = {"update", "pop", "popitem", "setdefault", "clear", "__setitem__", "__delitem__"}
NO_ORDINARY_WAY = "# No ordinary way:"


@cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, Function | ast.ClassDef)
        name = f"{prefix}{node.name}" if isinstance(node, Function | ast.ClassDef) else ""
        if isinstance(node, Function):
            yield name, node
        yield from functions(node, f"{name}." if named else prefix)


def body_lines(function: Function, lines: list[str]) -> int:
    """Count the lines of code after the signature and the docstring; comments and empty lines are free."""
    body = function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    if not body:
        return 0
    text = [line.strip() for line in lines[body[0].lineno - 1 : function.end_lineno]]
    return sum(bool(line) and not line.startswith("#") for line in text)


def branches(function: Function) -> int:
    """Count the places where the way through a function forks: a chain of ``and`` or ``or`` is one."""
    return sum(isinstance(node, _BRANCHING) for node in ast.walk(function))


def long_files(sources: Mapping[str, str]) -> Breaches:
    """Files of more than 300 lines."""
    return {name: {"file"} for name, source in sources.items() if len(source.splitlines()) > MAX_FILE_LINES}


def long_functions(sources: Mapping[str, str]) -> Breaches:
    """Functions whose body has more than 40 lines of code."""

    def too_long(source: str) -> Iterator[str]:
        lines = source.splitlines()
        return (name for name, node in functions(parse(source)) if body_lines(node, lines) > MAX_BODY_LINES)

    return _by_module(sources, too_long)


def branching_functions(sources: Mapping[str, str]) -> Breaches:
    """Functions of framework with more than 15 branches."""
    framework = {name: source for name, source in sources.items() if name.startswith("framework.")}
    return _by_module(
        framework, lambda text: (name for name, node in functions(parse(text)) if branches(node) > MAX_BRANCHES)
    )


def large_contract(sources: Mapping[str, str]) -> Breaches:
    """``Strategy`` with more than 20 public methods, ``Traits`` with more than 8 fields."""

    def too_large(source: str) -> Iterator[str]:
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.ClassDef) and node.name == "Strategy":
                names = [part.name for part in node.body if isinstance(part, Function)]
                if sum(not name.startswith("_") for name in names) > MAX_STRATEGY_METHODS:
                    yield "Strategy"
            if isinstance(node, ast.ClassDef) and node.name == "Traits":
                fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
                if len(fields) > MAX_TRAITS:
                    yield "Traits"

    return _by_module(sources, too_large)


def foreign_writes(sources: Mapping[str, str]) -> Breaches:
    """Assignments to an attribute of an object that neither the function nor the module owns.

    A heuristic. An assignment ``a.b = ...`` is allowed where ``a`` is ``self`` or ``cls``, where the function made
    ``a`` by a call, where a class of the same module declares ``b``, and where no class of the package declares it or
    tensors have it: then ``a`` belongs to a library.
    """
    declared = {name: set(declared_attributes(parse(source))) for name, source in sources.items()}
    everywhere = set().union(*declared.values())
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        tree, others = parse(source), everywhere - declared[name]
        made = {id(part) for _, function in functions(tree) for part in _made_here(function)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store | ast.Del)
                and node.attr in others
                and not hasattr(torch.Tensor, node.attr)
                and not _is_named(node.value, _OWN)
                and id(node) not in made
            ):
                found.setdefault(name, set()).add(ast.unparse(node))
    return found


def declared_attributes(tree: ast.AST) -> Iterator[str]:
    """Yield the attributes that the classes of a module declare, in their bodies or by assigning to ``self``."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for statement in owner.body:
            one = getattr(statement, "target", None)
            targets = statement.targets if isinstance(statement, ast.Assign) else [one]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
        for node in ast.walk(owner):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_named(node.value, {"self"}):
                yield node.attr


def _is_named(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _made_here(function: Function) -> Iterator[ast.Attribute]:
    """Yield the attributes of the local names that the function binds to the result of a call."""
    names = {
        target.id
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            yield node


def rewired_objects(sources: Mapping[str, str]) -> Breaches:
    """Writes into ``__dict__``, and ``__class__`` replaced, without a comment that begins with "No ordinary way:".

    The comment gives the reason why neither ``setattr`` nor a subclass does. It is directly above the write or on its
    line.
    """

    def unexplained(source: str) -> Iterator[str]:
        lines = source.splitlines()
        return (ast.unparse(part) for node, part in _rewired(parse(source)) if not _is_explained(node, lines))

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
        tree = parse(source)
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


RULES: dict[Callable[[Mapping[str, str]], Breaches], Mapping[str, str]] = {
    long_files: known_breaches.LONG_FILES,
    long_functions: known_breaches.LONG_FUNCTIONS,
    branching_functions: known_breaches.BRANCHING_FUNCTIONS,
    large_contract: known_breaches.LARGE_CONTRACT,
    foreign_writes: known_breaches.FOREIGN_WRITES,
    rewired_objects: known_breaches.REWIRED_OBJECTS,
    long_chains: known_breaches.LONG_CHAINS,
}


def entry(module: str, names: Iterable[str]) -> str:
    """Return the line of known_breaches.py that names these breaches of a module."""
    return f'"{module}": "{" ".join(sorted(names))}"'


@pytest.mark.parametrize(("rule", "known"), RULES.items(), ids=lambda rule: getattr(rule, "__name__", ""))
def test_no_breach_but_the_known_ones(rule: Callable[[Mapping[str, str]], Breaches], known: Mapping[str, str]) -> None:
    found = rule(package_sources())
    new = {name: names - set(known.get(name, "").split()) for name, names in found.items()}
    assert not any(new.values()), f"{rule.__doc__} New: " + ", ".join(
        entry(name, names) for name, names in new.items() if names
    )
    stale = {name: set(names.split()) - found.get(name, set()) for name, names in known.items()}
    assert not any(stale.values()), f"{rule.__name__} has no such breach any more, remove from known_breaches.py: " + (
        ", ".join(entry(name, names) for name, names in stale.items() if names)
    )


def test_a_planted_long_file_is_found() -> None:
    assert not long_files({"framework.a": "\n" * 300})
    assert long_files({"framework.a": "\n" * 301}) == {"framework.a": {"file"}}


def test_a_planted_long_function_is_found() -> None:
    body = "    x = 1\n    # why\n\n" * 40
    text = f'class A:\n  def f(self):\n    """Say.\n\n    More.\n    """\n{body}'
    assert not long_functions({"cli.a": text})
    assert long_functions({"cli.a": f"{text}    y = 1"}) == {"cli.a": {"A.f"}}


def test_a_planted_branching_function_is_found() -> None:
    forks = ["if a: b", "for a in b: c", "while a: b", "a if b else c", "a and b and c", "[a for a in b]"]
    body = "".join(f"    {fork}\n" for fork in [*forks, *forks, "if a: b", "try: a\n    except E: b"])
    text = f"def f():\n{body}"
    assert not branching_functions({"framework.a": f"{text}    a or b"})
    assert not branching_functions({"cli.a": f"{text}    a or b\n    a or b"})
    assert branching_functions({"framework.a": f"{text}    a or b\n    a or b"}) == {"framework.a": {"f"}}


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
        "def f(run):\n    run.seed = 1",
        "def f(run):\n    run.seed += 1",
        "def f(run):\n    run.seed, a = 1, 2",
        "def f(run):\n    del run.seed",
        "class A:\n    def f(self):\n        self.run.seed = 1",
        "class A:\n    def f(self):\n        for self.run.seed in b: ...",
    ],
)
def test_a_planted_write_from_outside_is_found(source: str) -> None:
    owner = {"framework.run": "class Run:\n    def __init__(self):\n        self.seed = 0"}
    assert foreign_writes({**owner, "framework.a": source}).keys() == {"framework.a"}


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        self.seed = 1",
        "def f():\n    run = Run()\n    run.seed = 1",
        "@dataclass\nclass Own:\n    seed: int\ndef f(own):\n    own.seed = 1",
        "def f(parameter):\n    parameter.grad = None",
        "def f(run):\n    run.seed.x[0] = 1",
    ],
)
def test_writes_of_an_owner_are_not_reported(source: str) -> None:
    owner = {"framework.run": "class Run:\n    seed: int = 0"}
    assert not foreign_writes({**owner, "framework.a": source})


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
