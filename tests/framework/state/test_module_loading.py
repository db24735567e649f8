"""``load_from_checkpoint``: a module rebuilt from what was saved, which touches nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer, weights_of
from torch import nn, optim

from phalanx import TrainModule
from phalanx.framework.core.errors import CheckpointError, ConfigurationError


class Drawing(TrainModule):
    """Draws from every generator while it is built, and keeps a table of its own beside the weights."""

    def __init__(self, width: int = 4, rate: float = 0.1, words: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(random.randrange(1000))
        np.random.seed(3)
        random.seed(np.random.randint(1000))
        self.net = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
        if torch.cuda.is_initialized():
            torch.randn(3, device="cuda")
        self.table: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=self.hparams.rate)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["table"] = {"a": torch.arange(3), "b": 2}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.table = checkpoint["table"]


class Renamed(Drawing):
    """Other names and another shape than what was saved."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.net[2] = nn.Linear(width, 2)
        self.head = nn.Linear(1, 1)
        del self.net[1]


def saved(root: Path, weights_only: bool = False) -> tuple[Path, Drawing]:
    module = Drawing(5, words=("x", "y"))
    trainer = silent_trainer(max_steps=2, default_root_dir=root)
    trainer.fit(module, loader(16))
    trainer.save_checkpoint(root / "a.ckpt", weights_only=weights_only)
    return root / "a.ckpt", module


def draws() -> tuple[Any, ...]:
    on_gpu = torch.rand(3, device="cuda").tolist() if torch.cuda.is_available() else []
    return torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist(), on_gpu


def seeded() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


@pytest.mark.parametrize("weights_only", [False, True])
def test_it_is_the_module_that_was_saved_and_no_generator_moves(tmp_path: Path, weights_only: bool) -> None:
    path, module = saved(tmp_path, weights_only)
    seeded()
    expected = draws()

    seeded()
    rebuilt = Drawing.load_from_checkpoint(path)
    assert draws() == expected
    assert (rebuilt.hparams.width, rebuilt.hparams.words) == (5, ("x", "y"))
    assert torch.equal(weights_of(rebuilt), weights_of(module))
    assert torch.equal(rebuilt.net[1].running_mean, module.net[1].running_mean)  # type: ignore[arg-type]
    assert [str(value) for value in rebuilt.table.values()] == ([] if weights_only else ["tensor([0, 1, 2])", "2"])


def test_generators_are_put_back_where_the_constructor_fails(tmp_path: Path) -> None:
    path, _ = saved(tmp_path)

    class Failing(Drawing):
        def __init__(self, **arguments: Any) -> None:
            super().__init__()
            raise TypeError("no such luck")

    seeded()
    expected = draws()
    seeded()
    with refuses(CheckpointError, "Failing", "no such luck"):
        Failing.load_from_checkpoint(path)
    assert draws() == expected


def test_what_does_not_fit_is_refused_or_left_and_named(tmp_path: Path) -> None:
    path, module = saved(tmp_path)
    with refuses(CheckpointError, "head.weight", "net.1.running_mean"):
        Renamed.load_from_checkpoint(path)

    with pytest.warns(UserWarning, match="took 2 of 6 tensors") as told:
        rebuilt = Renamed.load_from_checkpoint(path, strict=False)
    assert torch.equal(rebuilt.net.get_parameter("0.weight"), module.net.get_parameter("0.weight"))
    text = str(told[0].message)
    for left in (
        "head.weight: missing in the checkpoint",
        "net.1.running_mean: unknown to the module",
        "net.1.weight: (5,) in the checkpoint, (2, 5) in the module",
        "net.2.bias: unknown to the module",
    ):
        assert left in text
    assert told[0].filename == __file__


class Loading(Drawing):
    """Has another name for a layer than checkpoints, which ``load_state_dict`` translates."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.body = self.net[0]
        _, norm, last = self.net
        self.net = nn.Sequential(norm, last)

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        layers = {f"net.{index}.": f"net.{index - 1}." if index else "body." for index in range(3)}
        self.loaded = sorted(state_dict)
        return super().load_state_dict({layers[k[:6]] + k[6:]: v for k, v in state_dict.items()}, *args, **options)


def test_an_overridden_load_state_dict_is_called(tmp_path: Path) -> None:
    path, module = saved(tmp_path)
    rebuilt = Loading.load_from_checkpoint(path)
    assert rebuilt.loaded == sorted(module.state_dict())
    assert torch.equal(rebuilt.get_parameter("body.weight"), module.get_parameter("net.0.weight"))
    assert torch.equal(rebuilt.get_buffer("net.0.running_mean"), module.get_buffer("net.1.running_mean"))

    class Counting(Drawing):
        loads = 0

        def load_state_dict(self, *args: Any, **options: Any) -> Any:
            self.loads += 1
            return super().load_state_dict(*args, **options)

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("loss", self.net(batch[0]).square().mean())

    assert Counting.load_from_checkpoint(path).loads == 1
    # A Trainer loads the part of each rank, and says so.
    counting = Counting(5)
    silent_trainer(max_steps=1).test(counting, loader(16), ckpt_path=path)
    assert counting.loads == 0


def test_a_hook_on_load_state_dict_is_called(tmp_path: Path) -> None:
    path, module = saved(tmp_path)

    class Hooked(Drawing):
        def __init__(self, width: int = 4) -> None:
            super().__init__(width)
            self.net.register_load_state_dict_pre_hook(self.scaled)

        def scaled(self, part: Any, state_dict: Any, prefix: str, *_: Any) -> None:
            state_dict[f"{prefix}0.bias"] = state_dict[f"{prefix}0.bias"] + 1.0

    loaded = Hooked.load_from_checkpoint(path).get_parameter("net.0.bias")
    assert torch.equal(loaded, module.get_parameter("net.0.bias") + 1.0)

    class Wrong(Hooked):
        def __init__(self, width: int = 4) -> None:
            super().__init__(width)
            self.head = nn.Linear(1, 1)

    with refuses(CheckpointError, "head", "strict=False"):
        Wrong.load_from_checkpoint(path)


@pytest.mark.filterwarnings("error")
def test_a_full_match_is_loaded_silently(tmp_path: Path) -> None:
    path, module = saved(tmp_path)
    for device in ("cpu", torch.device("cpu")):
        rebuilt = Drawing.load_from_checkpoint(path, strict=False, map_location=device)
        assert torch.equal(weights_of(rebuilt), weights_of(module))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"map_location": "cdua"}, "'cuda'"),
        ({"map_location": "meta"}, "map_location='meta'"),
        ({"map_location": {"cuda:0": "cpu", "cuda:1": "cuda"}}, "map_location={"),
        ({"map_location": "cuda:99"}, "'cuda:99'"),
        ({"widht": 3}, "'width'"),
    ],
)
def test_wrong_arguments_get_a_sentence(tmp_path: Path, arguments: dict[str, Any], name: str) -> None:
    path, _ = saved(tmp_path)
    with refuses(ConfigurationError, name, varies=r"\d+(?= CUDA devices)"):
        Drawing.load_from_checkpoint(path, **arguments)


class Lenient(Regressor):
    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(2, 2)


def test_without_an_argument_the_module_decides_how_strict_loading_is(tmp_path: Path) -> None:
    trainer = silent_trainer(devices=1, max_steps=1)
    trainer.fit(module := Regressor(), loader(4))
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    with pytest.warns(UserWarning, match="extra.weight"):
        rebuilt = Lenient.load_from_checkpoint(tmp_path / "saved.ckpt")
    assert torch.equal(rebuilt.state_dict()["net.0.weight"], module.state_dict()["net.0.weight"])
    with refuses(CheckpointError, "extra.weight"):
        Lenient.load_from_checkpoint(tmp_path / "saved.ckpt", strict=True)
