"""The tiers of tests: what the quick tier leaves out comes round, and no function is in the wrong tier."""

from __future__ import annotations

import ast
from pathlib import Path

from tiers import DURATIONS, SLOW_SECONDS, WRONG_SECONDS, function_of, misplaced, read_durations, sample

CASES = {f"test_a.py::test_{number}": [f"tests/test_a.py::test_{number}[{case}]" for case in "abc"] for number in "123"}
SECONDS = dict.fromkeys(CASES, 2.0)


def test_every_case_of_a_slow_function_comes_round() -> None:
    chosen = [sample(CASES, SECONDS, f"commit {number}", 4.0) for number in range(60)]
    assert all(len({function_of(nodeid) for nodeid in each}) == len(each) == 2 for each in chosen)
    assert set().union(*chosen) == {nodeid for cases in CASES.values() for nodeid in cases}
    assert sample(CASES, SECONDS, "commit 1", 4.0) == chosen[1]


def test_a_slow_function_that_is_not_listed_is_found_on_a_slow_machine_too() -> None:
    listed = {"quick.py::test_listed": 2.0}
    taken = {
        "quick.py::test_listed": [4.0],
        "a.py::test_a": [3 * WRONG_SECONDS, 3 * WRONG_SECONDS],
        "b.py::test_b": [1.0],
    }
    assert misplaced(taken, listed) == {"a.py::test_a": 1.5 * WRONG_SECONDS}
    assert misplaced({"a.py::test_a": [1.5 * WRONG_SECONDS]}, listed) == {"a.py::test_a": 1.5 * WRONG_SECONDS}


def test_the_list_names_functions_that_exist() -> None:
    known = set()
    tests = DURATIONS.parent
    for file in {name.partition("::")[0] for name in read_durations()}:
        tree = ast.parse((tests / file).read_text(encoding="utf-8")) if (tests / file).is_file() else ast.Module([], [])
        known |= {f"{file}::{node.name}" for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert read_durations().keys() - known == set(), "run `make durations`"
    assert all(seconds >= SLOW_SECONDS for seconds in read_durations().values())


def test_a_case_is_named_after_its_function() -> None:
    assert function_of("tests/a/test_b.py::test_c[x::y]") == "a/test_b.py::test_c"
    assert Path(DURATIONS).name == "durations.json"
