"""Each recipe in its short form, as a script of its own; its own assertions decide."""

from __future__ import annotations

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
