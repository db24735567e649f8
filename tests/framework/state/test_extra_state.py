"""State of the user's own: what ``get_extra_state`` returns, and entries in the dict of ``on_save_checkpoint``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer
from ranks import run_on_ranks
from torch import nn

from phalanx import Fabric
from phalanx.callbacks import Callback
from phalanx.checkpoint import load
from phalanx.framework.core.errors import ConfigurationError


class Counts(nn.Module):
    """Counts its calls, in a value and in a tensor that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.amax = 0, torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.amax = self.amax + 1
        return x

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "amax": self.amax}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls, self.amax = state["calls"], state["amax"]


class Counting(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.net.append(Counts())

    @property
    def counts(self) -> Counts:
        """The module that counts."""
        found = self.net[-1]
        assert isinstance(found, Counts)
        return found


class Renamed(Counting):
    checkpoint_renames: ClassVar[dict[str, str]] = {"net": "body"}

    def __init__(self) -> None:
        super().__init__()
        self.body = self.net
        del self.net

    @property
    def counts(self) -> Counts:
        found = self.body[-1]
        assert isinstance(found, Counts)
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.body(x)
        return result


def fitted(strategy: str, root: str, **settings: Any) -> tuple[int, list[float]]:
    given = settings.pop("ckpt_path", None)
    module = settings.pop("kind", Counting)()
    devices = 1 if strategy == "single" else 2
    trainer = silent_trainer(devices=devices, strategy=strategy, max_epochs=-1, **settings)
    trainer.fit(module, loader(64, 4), ckpt_path=given)
    if given is None:
        trainer.save_checkpoint(f"{root}/last.ckpt")
    return module.counts.calls, module.counts.amax.tolist()


def there_and_back(strategy: str, root: str) -> None:
    assert fitted(strategy, root, max_steps=3) == (3, [3.0, 3.0])
    for kind in (Counting, Renamed):
        assert fitted(strategy, root, max_steps=5, ckpt_path=f"{root}/last.ckpt", kind=kind) == (5, [5.0, 5.0])


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2), ("zero3", 2)])
def test_it_is_resumed(strategy: str, ranks: int, tmp_path: Path) -> None:
    run_on_ranks(ranks, there_and_back, strategy, str(tmp_path))


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_module_is_rebuilt_with_it(tmp_path: Path, weights_only: bool) -> None:
    trainer = silent_trainer(max_steps=3)
    trainer.fit(Counting(), loader(64, 4))
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only)
    module = Counting.load_from_checkpoint(tmp_path / "a.ckpt")
    assert (module.counts.calls, module.counts.amax.tolist()) == (3, [3.0, 3.0])
    with pytest.warns(UserWarning, match=r"extra state of net\.\d is not in the module"):
        Regressor.load_from_checkpoint(tmp_path / "a.ckpt")


def test_fabric_keeps_it(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    module = fabric.setup_module(Counting())
    for _ in range(2):
        module(torch.zeros(1, 6))
    fabric.save(tmp_path / "a.ckpt", {"model": module})
    other = fabric.setup_module(Counting())
    fabric.load(tmp_path / "a.ckpt", {"model": other})
    assert (other.counts.calls, other.counts.amax.tolist()) == (2, [2.0, 2.0])


class Own(Callback):
    """Has a state that differs from rank to rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank, "tensor": torch.full((2 + self.rank,), float(self.rank))}


def differing(strategy: str, root: str) -> None:
    own = Own(torch.distributed.get_rank())
    trainer = silent_trainer(devices=2, strategy=strategy, max_steps=1, callbacks=[own])
    trainer.fit(Regressor(), loader(64, 4))
    trainer.save_checkpoint(f"{root}/a.ckpt")


def test_the_state_that_is_kept_is_rank_0s(tmp_path: Path) -> None:
    run_on_ranks(2, differing, "fsdp", str(tmp_path))
    (state,) = (one for key, one in load(tmp_path / "a.ckpt")["state"]["callbacks"].items() if "Own" in key)
    assert state["rank"] == 0
    assert state["tensor"].tolist() == [0.0, 0.0]


# ---- entries of on_save_checkpoint -----------------------------------------------------------------------------------


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
