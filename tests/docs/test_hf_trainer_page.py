"""The arguments and hooks that the page for users of the Hugging Face Trainer names exist."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import phalanx
from phalanx import Callback, Trainer, TrainModule
from phalanx.callbacks import EarlyStopping, ModelCheckpoint
from phalanx.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy

PAGE = Path(phalanx.__file__).parent / "docs" / "migrating-from-hf-trainer.md"
KINDS: dict[str, Any] = {
    each.__name__: each
    for each in (Trainer, ModelCheckpoint, EarlyStopping, DDPStrategy, DeepSpeedStrategy, FSDPStrategy)
}


def test_each_argument_in_the_tables_exists() -> None:
    calls = re.findall(r"`(\w+)\(([^`]*)\)`", PAGE.read_text())
    named = [(kind, name) for kind, text in calls if kind in KINDS for name in re.findall(r"(\w+)=", text)]
    assert len(named) > 20
    for kind, name in named:
        parameters = inspect.signature(KINDS[kind]).parameters
        if name not in parameters:
            # Torch's or DeepSpeed's own arguments, which the constructor checks.
            KINDS[kind](**{name: {} if name == "config" else True})


def test_each_hook_in_the_tables_exists() -> None:
    rows = [line.split("|", 2)[2] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    hooks = {name for row in rows for name in re.findall(r"`(on_\w+|\w+_step|configure_\w+|\w+_dataloader)`", row)}
    assert len(hooks) > 10
    assert [name for name in hooks if not hasattr(Callback, name) and not hasattr(TrainModule, name)] == []


def test_each_attribute_of_a_trainer_exists() -> None:
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    right = " ".join(line.split("|", 2)[2] for line in PAGE.read_text().splitlines() if line.startswith("|"))
    names = set(re.findall(r"`trainer\.(\w+)", right))
    assert len(names) > 6
    assert names - set(dir(trainer)) == set()
