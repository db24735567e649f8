"""The package as users get it: one copy in memory, every file in the wheel, nothing heavy on import."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import phalanx

ROOT = Path(phalanx.__file__).parent
HEAVY = {
    "accelerate",
    "deepspeed",
    "lightning",
    "mlflow",
    "pytorch_lightning",
    "rich",
    "sympy",  # comes with DTensor
    "tensorboard",
    "torchmetrics",
    "trackio",
    "wandb",
}

# Modules that start-up does not pay for: they are imported when one of their functions is first called.
LOADED_WHEN_CALLED = {
    "checkpoint.inspection",
    "checkpoint.writer",
    "diagnostics.collective_trace",
    "launch.fork_launcher",
    "launch.fork_server",
    "launch.rank_output",
    "launch.script_launcher",
    "launch.supervisor",
    "lightning_utilities",
    "loop.batch_norm_statistics",
    "loop.evaluation_loop",
    "loop.manual_step",
    "memory.formulas",
    "resume.capture",
    "resume.export",
    "resume.restore",
    "state.module_loading",
    "trainer.assembly",
    "trainer.auto_strategy",
    "watchdog.in_process_watchdog",
}


def copies(files: Mapping[str, str | None], root: Path) -> dict[str, list[str]]:
    """Return the files of the package that are loaded under more than one name."""
    names: dict[str, list[str]] = defaultdict(list)
    for name, file in files.items():
        path = Path(file).resolve() if file else None
        if path is not None and path.is_relative_to(root) and name != "__main__":
            names[path.relative_to(root).as_posix()].append(name)
    return {file: found for file, found in names.items() if len(found) > 1 and ".venv" not in file}


def sources(root: Path) -> list[str]:
    """Return the files of the working tree that git tracks or would track, or all of them without git."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True, check=False
    )
    if listed.returncode == 0:
        return [name for name in listed.stdout.splitlines() if (root / name).is_file()]
    return [
        path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and ".venv" not in path.parts
    ]


def belongs_in_wheel(files: Iterable[str]) -> set[str]:
    """Return what a wheel must hold: python files of the root and of every package, and the templates of projects."""
    files = set(files)
    packages = {name.split("/")[0] for name in files if name.count("/") == 1 and name.endswith("/__init__.py")}
    inside = {name for name in files if name.endswith(".py") and ("/" not in name or name.split("/")[0] in packages)}
    # It builds the package.
    inside.discard("setup.py")
    templates = {name for name in files if name.startswith("cli/templates/")}
    return {f"phalanx/{name}" for name in inside | templates | {"py.typed"}}


def loaded_by(*statements: str, before: str = "") -> list[set[str]]:
    """Run statements in a fresh interpreter; return the modules that are there after each, without those ``before``."""
    note = "loaded.append(sorted(set(sys.modules) - old))"
    lines = [f"import json, sys\n{before}\nold, loaded = set(sys.modules), []"]
    lines += [f"{statement}\n{note}" for statement in statements]
    script = "\n".join([*lines, "print(json.dumps(loaded))"])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    return [set(modules) for modules in json.loads(done.stdout.splitlines()[-1])]


def packages(modules: Iterable[str]) -> set[str]:
    """Return the top-level modules."""
    return {name.partition(".")[0] for name in modules}


def loaded_too_early(modules: Iterable[str]) -> set[str]:
    """Return the modules that a plain fit does not run."""
    return {name.removeprefix("phalanx.framework.") for name in modules} & LOADED_WHEN_CALLED


def test_one_copy_of_the_package_is_loaded() -> None:
    assert not copies({name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}, ROOT)


def test_the_tests_run_their_own_checkout() -> None:
    assert Path(__file__).resolve().parents[2] == ROOT.resolve()


def test_the_wheel_holds_every_file_of_the_package_and_no_other(tmp_path: Path) -> None:
    files = sources(ROOT)
    for name in files:  # a copy, so that building leaves nothing in the checkout and finds nothing stale there
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / "tree" / name)
    wheel = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", wheel], cwd=tmp_path / "tree", check=True, timeout=100)
    held = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert {name for name in held if ".dist-info/" not in name} == belongs_in_wheel(files)
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_import_phalanx_loads_only_itself_and_the_standard_library() -> None:
    (loaded,) = loaded_by("import phalanx")
    assert packages(loaded) - sys.stdlib_module_names == {"phalanx"}


def test_a_trainer_loads_nothing_heavy_beside_torch_and_no_module_that_a_plain_fit_does_not_run() -> None:
    trainer, others, strategies = loaded_by(
        "from phalanx import Trainer, TrainModule",
        "from phalanx import Fabric",
        "from phalanx.strategies import DeepSpeedStrategy; DeepSpeedStrategy(stage=3)\n"
        "for name in ('ddp', 'fsdp'): Trainer(strategy=name, accelerator='cpu', devices=2)",
        before="import torch",
    )
    assert not loaded_too_early(trainer)
    assert not packages(others) & HEAVY
    # Runs under DeepSpeed alone load it.
    assert not packages(strategies) & {"deepspeed", "pydantic"}


def test_planted_modules_that_are_heavy_or_loaded_too_early_are_found() -> None:
    (heavy,) = loaded_by("import phalanx, rich")
    assert "rich" in packages(heavy) & HEAVY
    early = {"phalanx.framework.launch.supervisor", "phalanx.framework.trainer.trainer"}
    assert loaded_too_early(early) == {"launch.supervisor"}


def test_a_planted_second_copy_is_found(tmp_path: Path) -> None:
    file = str(tmp_path / "framework" / "a.py")
    both = {"phalanx.framework.a": file, "main.framework.a": file, "torch": "/elsewhere/torch.py", "sys": None}
    assert copies(both, tmp_path) == {"framework/a.py": ["phalanx.framework.a", "main.framework.a"]}


def test_a_folder_missing_from_the_package_list_would_be_found() -> None:
    files = [
        "__init__.py",
        "setup.py",
        "README.md",
        "framework/__init__.py",
        "framework/a.py",
        "new/__init__.py",
        "cli/templates/a/config.yaml",
        "tests/test_a.py",
    ]
    expected = {"__init__.py", "py.typed", "framework/__init__.py", "framework/a.py", "new/__init__.py", files[6]}
    assert belongs_in_wheel(files) == {f"phalanx/{name}" for name in expected}
