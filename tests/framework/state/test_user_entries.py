"""The dict of ``on_save_checkpoint`` and ``on_load_checkpoint``: entries of the user's own, and no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import refuses
from models import Regressor, loader, silent_trainer

from phalanx.framework.core.errors import ConfigurationError


class Saves(Regressor):
    def __init__(self, action: Callable[[dict[str, Any]], Any] = dict) -> None:
        super().__init__()
        self.action = action
        self.loaded: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1
        self.action(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = (checkpoint["mine"], checkpoint.get("other"), checkpoint.pop("mine"))
        with pytest.raises(ConfigurationError, match=r"on_load_checkpoint.*strict_loading"):
            checkpoint["state_dict"] = {}


@pytest.mark.parametrize(
    ("action", "named"),
    [
        (lambda checkpoint: checkpoint["state_dict"], "save_frozen"),
        (lambda checkpoint: checkpoint.update(mine=2) or checkpoint.__setitem__("state_dict", {}), "save_frozen"),
        (lambda checkpoint: checkpoint.pop("optimizer_states", None), "self.trainer.optimizers"),
        (lambda checkpoint: checkpoint.get("global_step"), "self.global_step"),
    ],
)
def test_other_parts_of_a_checkpoint_are_refused(tmp_path: Path, action: Callable[[Any], Any], named: str) -> None:
    trainer = silent_trainer(devices=1, max_epochs=1)
    trainer.fit(Saves(action), loader(8))
    with refuses(ConfigurationError, "on_save_checkpoint", named):
        trainer.save_checkpoint(tmp_path / "saved.ckpt")


def test_own_entries_return(tmp_path: Path) -> None:
    trainer = silent_trainer(devices=1, max_epochs=1)
    trainer.fit(Saves(), loader(8))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    module = Saves()
    silent_trainer(devices=1, max_epochs=2).fit(module, loader(8), ckpt_path=tmp_path / "saved.ckpt")
    assert module.loaded == (1, None, 1)
