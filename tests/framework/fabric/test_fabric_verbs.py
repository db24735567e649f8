"""The methods of a Fabric, under their own names and Accelerate's: all of them are in its file, and documented."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import phalanx
from phalanx import Fabric
from phalanx.framework.fabric.fabric import ABSENT

PAGE = Path(phalanx.__file__).parent / "docs" / "fabric.md"
# Attributes that the Trainer uses, and use_strategy, which replaces the strategy before a fit.
INTERNAL = {
    *("accumulation", "forward_context", "resources", "scaler", "strategy_scales_losses", "updater", "use_strategy"),
    *("compilation", "callbacks", "loggers", "precision", "strategy", "world"),
}


def documented() -> set[str]:
    """Return the names in the tables of verbs."""
    tables = PAGE.read_text().partition("## All methods")[2]
    return set(re.findall(r"`(\w+)`", "\n".join(line for line in tables.splitlines() if line.startswith("|"))))


def test_every_public_name_is_documented_and_every_documented_name_exists() -> None:
    public = {name for name in dir(Fabric(accelerator="cpu", devices=1)) if not name.startswith("_")} - ABSENT.keys()
    assert public - INTERNAL == documented()


def test_every_method_is_written_in_the_file_of_the_class_with_its_signature() -> None:
    methods = {name: value for name, value in vars(Fabric).items() if inspect.isfunction(value) and name[0] != "_"}
    assert len(methods) > 50
    for name, method in methods.items():
        assert inspect.unwrap(method).__code__.co_filename.endswith("fabric/fabric.py"), name
    fabric = Fabric(accelerator="cpu", devices=1)
    assert list(inspect.signature(fabric.save).parameters) == ["path", "state", "filter"]


def test_every_public_member_has_a_docstring() -> None:
    members = {name: value for name, value in vars(Fabric).items() if not name.startswith("_")}
    assert [name for name, value in members.items() if not inspect.getdoc(value)] == []


def test_a_verb_can_be_overridden_and_called_through_super() -> None:
    class Doubling(Fabric):
        def all_reduce(self, data: Any, op: str = "mean", *, reduce_op: str | None = None, group: None = None) -> Any:
            return 2 * super().all_reduce(data, op, reduce_op=reduce_op)

    assert Doubling(accelerator="cpu", devices=1).all_reduce(3, "sum").item() == 6


def test_accelerates_names_stand_for_the_same() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    assert vars(Fabric)["wait_for_everyone"] is vars(Fabric)["barrier"]
    assert (fabric.num_processes, fabric.process_index, fabric.local_process_index) == (1, 0, 0)
    assert fabric.is_main_process
    assert fabric.is_local_main_process
    assert fabric.is_last_process
    with fabric.main_process_first(1.0), fabric.local_main_process_first(timeout=1.0):
        fabric.wait_for_everyone()
