"""Hyperparameters: which arguments are kept, and how modules are rebuilt from them."""

from __future__ import annotations

import inspect
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import refuses
from models import Regressor, loader, silent_trainer, weights_of
from torch import nn, optim

from phalanx import TrainModule
from phalanx.framework.core.errors import CheckpointError, ConfigurationError
from phalanx.framework.state.hyperparameters import imported_classes


def fit_and_save(module: TrainModule, path: Path) -> None:
    trainer = silent_trainer(devices=1, max_steps=1)
    trainer.fit(module, loader(8))
    trainer.save_checkpoint(path)


class Plain(TrainModule):
    def __init__(self, width: int, depth: int = 2, *, name: str = "plain", **extra: Any) -> None:
        super().__init__()
        local = width * depth  # noqa: F841 - no argument, so it is not kept
        self.save_hyperparameters()


def test_all_arguments_are_kept() -> None:
    assert Plain(3, name="mine", rate=0.1).hparams == {"width": 3, "depth": 2, "name": "mine", "rate": 0.1}
    assert Plain(3).hparams.depth == 2


def test_some_arguments_are_kept() -> None:
    class Some(TrainModule):
        def __init__(self, a: int, b: int, c: int) -> None:
            super().__init__()
            self.save_hyperparameters("a", "b", ignore="b")

    class Ignoring(TrainModule):
        def __init__(self, a: int, b: int, c: nn.Module) -> None:
            super().__init__()
            self.save_hyperparameters(ignore=["b", "c"])

    assert Some(1, 2, 3).hparams == {"a": 1}
    assert Ignoring(1, 2, nn.Linear(1, 1)).hparams == {"a": 1}


@pytest.mark.parametrize("given", [{"a": 1, "b": [2]}, Namespace(a=1, b=[2])])
def test_a_mapping_is_kept_as_it_is(given: Any) -> None:
    class Mapped(TrainModule):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)

    assert Mapped(given).hparams == {"a": 1, "b": [2]}


def test_a_subclass_adds_its_own() -> None:
    class Child(Plain):
        def __init__(self, width: int, rate: float) -> None:
            super().__init__(width + 1, depth=5)

    class Both(Plain):
        def __init__(self, width: int, rate: float) -> None:
            super().__init__(width + 1, depth=5)
            self.save_hyperparameters()

    class Leaving(Plain):
        def __init__(self, width: int, rate: float) -> None:
            super().__init__(width)
            self.save_hyperparameters(ignore=["depth", "name"])

    # What the outermost class was given, which is what it is rebuilt with.
    assert Child(3, 0.1).hparams == {"width": 3, "rate": 0.1, "depth": 5, "name": "plain"}
    assert Both(3, 0.1).hparams == {"width": 3, "rate": 0.1, "depth": 5, "name": "plain"}
    # It leaves out what its base has kept.
    assert Leaving(3, 0.1).hparams == Leaving(3, 0.1).hparams_initial == {"width": 3, "rate": 0.1}


class Widths:
    """A class that is neither a module, an optimizer nor a scheduler."""

    hidden = 3


class Assembled(TrainModule):
    def __init__(
        self, encoder_class: type = nn.Linear, optimizer_class: type = optim.SGD, widths: type[Widths] = Widths
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = encoder_class(6, widths.hidden)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.encoder(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return self.hparams.optimizer_class(self.parameters(), lr=0.1)


class Encoder(nn.Linear):
    """A module given as a hyperparameter."""


def test_classes_are_kept_by_name_and_taken_from_imported_modules(tmp_path: Path) -> None:
    module = Assembled(Encoder, optim.Adam)
    fit_and_save(module, tmp_path / "classes.ckpt")
    again = Assembled.load_from_checkpoint(tmp_path / "classes.ckpt")
    assert type(again.encoder) is Encoder
    assert again.hparams == {"encoder_class": Encoder, "optimizer_class": optim.Adam, "widths": Widths}
    assert torch.equal(again.encoder.weight, module.encoder.weight)


@pytest.mark.parametrize("named", ["subprocess:Popen", "antigravity:Antigravity", "builtins:eval", "torch:nn.Gone", 3])
def test_a_class_is_found_only_where_it_cannot_run_other_code(named: Any) -> None:
    parameters = inspect.signature(Assembled.__init__).parameters
    assert imported_classes({"encoder_class": named}, parameters) == {}
    assert "antigravity" not in sys.modules
    assert imported_classes({"encoder_class": "torch.nn.modules.linear:Linear"}, parameters)
    assert imported_classes([named], parameters) == {}


def test_mistakes_get_a_sentence() -> None:
    class Wrong(TrainModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.save_hyperparameters("widht")

    class Values(TrainModule):
        def __init__(self, rate: float, name: str) -> None:
            super().__init__()
            self.save_hyperparameters(rate, name)

    with refuses(ConfigurationError, "'widht'", "'width'"):
        Wrong(1)
    with refuses(ConfigurationError, "save_hyperparameters"):
        Values(3.14, "abc")
    with refuses(AttributeError, "'dept'", "'depth'"):
        _ = Plain(1).hparams.dept
    assert not hasattr(Plain(1).hparams, "nothing")


def test_hyperparameters_sent_to_loggers() -> None:
    class Silent(TrainModule):
        def __init__(self, a: int = 1) -> None:
            super().__init__()
            self.save_hyperparameters(logger=False)

    assert Silent().hparams_to_log == {}
    assert Plain(1, depth=3).hparams_to_log == {"width": 1, "depth": 3, "name": "plain"}
    assert TrainModule().hparams_to_log == {}


class Sized(TrainModule):
    def __init__(self, width: int = 4, rate: float = 0.1, extra: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="extra")
        self.net = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 1))
        self.extra = extra

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=self.hparams.rate)


def test_a_module_is_rebuilt_from_its_checkpoint(tmp_path: Path) -> None:
    module = Sized(width=7, rate=0.01)
    fit_and_save(module, tmp_path / "saved.ckpt")
    rebuilt = Sized.load_from_checkpoint(tmp_path / "saved.ckpt", extra="given now", rate=0.5)
    assert (rebuilt.hparams.width, rebuilt.hparams.rate, rebuilt.extra) == (7, 0.5, "given now")
    assert (weights_of(rebuilt) == weights_of(module)).all()


class WithActivation(Regressor):
    def __init__(self, width: int = 3, activation: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_what_a_checkpoint_cannot_hold_is_said_and_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = silent_trainer(max_steps=1, default_root_dir=tmp_path, enable_checkpointing=True)
    trainer.fit(WithActivation(5, torch.tanh), loader(8))
    assert "do not hold the hyperparameters activation" in capsys.readouterr().out
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    with refuses(CheckpointError, "activation="):
        WithActivation.load_from_checkpoint(path)
    assert WithActivation.load_from_checkpoint(path, activation=torch.tanh).hparams["width"] == 5


# ---- in the ways of code written for Lightning ---------------------------------------------------------------------


@dataclass(eq=False)
class Declared(TrainModule):
    width: int
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    name: str = "declared"
    unused: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="unused")


class Undeclared(Declared):
    def __init__(self, rate: float) -> None:
        super().__init__(width=3)


def test_the_fields_of_a_dataclass_are_kept() -> None:
    assert Declared(5, name="mine").hparams == {"width": 5, "sizes": [1, 2], "name": "mine"}
    assert Undeclared(0.1).hparams == {"width": 3, "sizes": [1, 2], "name": "declared", "rate": 0.1}


class Configured(TrainModule):
    def __init__(self, conf: Any, activation: Any = torch.relu) -> None:
        super().__init__()
        self.save_hyperparameters(conf)
        self.net = nn.Linear(6, self.hparams.width)
        self.activation = activation

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1)


class AtDefault(Configured):
    def __init__(self, width: int = 2, activation: Any = torch.relu) -> None:
        super().__init__({"width": width})
        self.save_hyperparameters()


@pytest.mark.parametrize("given", [{"width": 3}, Namespace(width=3)])
def test_a_container_of_hyperparameters_is_passed_to_its_argument(tmp_path: Path, given: Any) -> None:
    fit_and_save(Configured(given), tmp_path / "saved.ckpt")
    again = Configured.load_from_checkpoint(tmp_path / "saved.ckpt")
    assert again.hparams == {"width": 3}
    assert again.net.out_features == 3
    again = Configured.load_from_checkpoint(tmp_path / "saved.ckpt", strict=False, conf={"width": 3, "more": 1})
    assert again.hparams == {"width": 3, "more": 1}


def test_a_default_that_no_file_keeps_is_not_asked_for(tmp_path: Path) -> None:
    fit_and_save(AtDefault(), tmp_path / "default.ckpt")
    fit_and_save(AtDefault(activation=torch.tanh), tmp_path / "given.ckpt")
    assert AtDefault.load_from_checkpoint(tmp_path / "default.ckpt").activation is torch.relu
    with refuses(CheckpointError, "activation"):
        AtDefault.load_from_checkpoint(tmp_path / "given.ckpt")
