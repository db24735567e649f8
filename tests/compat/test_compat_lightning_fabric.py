"""Aliases of Lightning Fabric, and of names that the example programs of Lightning import."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from messages import refuses

from phalanx.compat import lightning as compat

pytest.importorskip("lightning.fabric")


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("", {"Fabric", "is_wrapped", "seed_everything"}),
        (".loggers", {"CSVLogger", "Logger", "TensorBoardLogger"}),
        (".strategies", {"DDPStrategy", "FSDPStrategy", "Strategy"}),
        (".utilities", {"measure_flops", "move_data_to_device", "rank_zero_only"}),
        (".utilities.rank_zero", {"rank_zero_info", "rank_zero_only", "rank_zero_warn"}),
        (".utilities.seed", {"seed_everything"}),
        (".utilities.types", {"Optimizable", "ReduceOp"}),
        (".wrappers", {"is_wrapped"}),
    ],
)
def test_a_module_of_fabric_has_names_of_lightning(module: str, names: set[str]) -> None:
    theirs = importlib.import_module(f"lightning.fabric{module}")
    ours = importlib.import_module(f"phalanx.compat.lightning.fabric{module}")
    assert names <= set(dir(theirs)) & set(dir(ours))


@pytest.mark.parametrize("name", ["CSVLogger", "TensorBoardLogger"])
def test_loggers_of_fabric_take_the_arguments_of_lightning(name: str, tmp_path: Path) -> None:
    theirs = getattr(importlib.import_module("lightning.fabric.loggers"), name)
    ours = getattr(importlib.import_module("phalanx.compat.lightning.fabric.loggers"), name)
    assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters)
    for given in ({}, {"name": "mine"}, {"name": None}, {"version": 3}):
        expected = theirs(tmp_path / "theirs", **given).log_dir
        assert ours(tmp_path / "ours", **given).log_dir == expected.replace("theirs", "ours")


def test_fabric_tells_its_modules_from_others() -> None:
    wrappers = importlib.import_module("phalanx.compat.lightning.fabric.wrappers")
    plain = torch.nn.Linear(2, 1)
    module = compat.fabric.Fabric(accelerator="cpu", devices=1).setup(plain)
    assert [wrappers.is_wrapped(each) for each in (module, plain, None)] == [True, False, False]
    assert wrappers._unwrap_objects(module) is plain
    assert wrappers._unwrap_objects(3) == 3


def test_types_of_fabric_serve_isinstance() -> None:
    types = importlib.import_module("phalanx.compat.lightning.fabric.utilities.types")
    assert isinstance(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1), types.Optimizable)


def test_accelerators_and_plugins_of_fabric_say_what_to_use() -> None:
    for module in ("accelerators", "plugins"):
        with refuses(ImportError, module):
            importlib.import_module(f"phalanx.compat.lightning.fabric.{module}")


def test_names_that_the_example_programs_of_lightning_use(capsys: pytest.CaptureFixture[str]) -> None:
    imports = importlib.import_module("phalanx.compat.lightning.utilities.imports")
    theirs = importlib.import_module("lightning.pytorch.utilities.imports")
    assert bool(imports._TORCHVISION_AVAILABLE) == bool(theirs._TORCHVISION_AVAILABLE)
    compat.cli_lightning_logo()
    assert capsys.readouterr().out == ""


def test_models_of_torchvision_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    models = ModuleType("torchvision.models")
    models.get_model = lambda name, width: (name, torch.nn.Linear(width, 1))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    helpers = importlib.import_module("phalanx.compat.lightning.utilities.model_helpers")
    name, model = helpers.get_torchvision_model("resnet18", width=3)
    assert (name, model.in_features) == ("resnet18", 3)
