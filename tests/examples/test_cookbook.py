"""Each recipe in its short form, as a script of its own; its own assertions decide."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from ranks import run_script

import phalanx

COOKBOOK = Path(phalanx.__file__).parent / "examples" / "cookbook"
RECIPES = sorted(path for path in COOKBOOK.glob("*.py") if path.stem != "tasks")
# scikit-learn's data and torchmetrics take longer to import than most recipes to run.
LIBRARIES = ("sklearn.datasets", "torchmetrics")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_the_recipe_shows_its_point(recipe: Path, tmp_path: Path) -> None:
    # One thread: with the tests beside it, several of them would wait for one another.
    done = run_script(recipe, "--short", "--out", str(tmp_path), env={"OMP_NUM_THREADS": "1"}, libraries=LIBRARIES)
    assert done.returncode == 0, done.stdout
    assert str(done.stdout).strip()


def test_there_are_twenty_recipes() -> None:
    assert len(RECIPES) >= 20


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_one_page_with_a_check(recipe: Path) -> None:
    source = recipe.read_text(encoding="utf-8")
    tree = ast.parse(source)
    title, _, rest = (ast.get_docstring(tree) or "").partition(":")
    assert title
    assert "check" in rest
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    assert source.count("\n") <= 90
    assert source.endswith('\n\nif __name__ == "__main__":\n    main()\n')
