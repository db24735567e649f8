"""The public names and arguments of Lightning's callbacks: each works, or its use says what to use instead."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_names import methods_that_lack_arguments, public, without_sentence
from messages import refuses
from small_fits import Tiny, loader, quiet_trainer

from phalanx import callbacks
from phalanx.callbacks import (
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    ProgressBar,
    RichProgressBar,
    StochasticWeightAveraging,
    TQDMProgressBar,
)
from phalanx.framework.core.errors import ConfigurationError

theirs = pytest.importorskip("lightning.pytorch.callbacks")

# Arguments of the constructors that need some.
REQUIRED: dict[str, tuple[Any, ...]] = {
    "EarlyStopping": ("val_loss",),
    "GradientAccumulationScheduler": ({0: 1},),
    "OnExceptionCheckpoint": ("folder",),
    "StochasticWeightAveraging": (0.1,),
    "ThroughputMonitor": (len,),
}
# The names without a counterpart.
ABSENT = {"BatchSizeFinder", "Checkpoint", "LearningRateFinder", "ModelPruning", "SpikeDetection"}


@pytest.mark.parametrize("name", sorted(set(theirs.__all__) - ABSENT))
def test_each_name_of_a_callback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Lightning sets this variable when it is imported.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    cls, own = getattr(theirs, name), getattr(callbacks, name)
    assert issubclass(own, Callback)
    arguments = REQUIRED.get(name, ())
    assert without_sentence(public(cls, cls(*arguments)), own(*arguments)) == {}
    assert methods_that_lack_arguments(cls, own) == {}


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_an_absent_name_is_documented_and_its_import_says_what_to_use(name: str) -> None:
    assert name in theirs.__all__
    with refuses(ImportError, name):
        exec(f"from phalanx.callbacks import {name}")
    page = Path(callbacks.__file__).parents[1] / "docs" / "migrating-from-lightning.md"
    assert f"`{name}`" in page.read_text()


def test_the_sentence_of_a_class_without_a_counterpart_in_a_subclass() -> None:
    class Averaging(StochasticWeightAveraging):
        pass

    with refuses(AttributeError, "'swa_end'", "average_at_end=True"):
        getattr(Averaging(0.1), "swa_end")  # noqa: B009


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("equals", ["=", ":"])
def test_names_of_checkpoints_with_a_prefix_and_another_equals_sign(equals: str, tmp_path: Path) -> None:
    metrics = {"epoch": 2, "step": 7, "val_loss": 0.25}
    names = []
    for kind in (theirs.ModelCheckpoint, ModelCheckpoint):
        checkpoint = kind(dirpath=tmp_path, filename="{epoch}-{val_loss:.2f}")
        checkpoint.CHECKPOINT_EQUALS_CHAR = equals
        tensors = {name: torch.tensor(value) for name, value in metrics.items()}
        names.append(checkpoint.format_checkpoint_name(tensors, prefix="best", ver=3))
    assert Path(names[1]).name == f"best-epoch{equals}2-val_loss{equals}0.25-v3.ckpt"
    assert names[0] == names[1]


def test_saved_checkpoints_have_the_other_equals_sign(tmp_path: Path) -> None:
    class Spaced(ModelCheckpoint):
        CHECKPOINT_EQUALS_CHAR = "_"

    quiet_trainer(tmp_path, Spaced(dirpath=tmp_path / "saved", save_last=True), max_epochs=1).fit(Tiny(), loader())
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"epoch_0-step_4.ckpt", "last.ckpt"}


def test_the_best_checkpoints_as_yaml(tmp_path: Path) -> None:
    yaml = import_module("yaml")
    saved = ModelCheckpoint(dirpath=tmp_path / "saved", monitor="val_loss", save_top_k=2)
    module = Tiny({"val_loss": [3.0, 1.0, 2.0]})
    quiet_trainer(tmp_path, saved, max_epochs=3).fit(module, loader(), loader())
    saved.to_yaml()
    expected = {path: float(score) for path, score in saved.best_k_models.items()}
    assert yaml.safe_load((tmp_path / "saved" / "best_k_models.yaml").read_text()) == expected
    assert sorted(expected.values()) == [1.0, 2.0]


# ---- progress -------------------------------------------------------------------------------------------------------


class Renamed(ProgressBar):
    def get_metrics(self, trainer: Any, module: Any) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, module)
        assert set(metrics) == {"train_loss_step", "train_loss_epoch"}
        return {"kind": type(module).__name__, "rate": module.lr}


def test_overridden_metrics_of_the_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = Renamed()
    with refuses(ConfigurationError, "Renamed.trainer"):
        _ = bar.trainer
    trainer = quiet_trainer(tmp_path, bar, max_epochs=1, enable_progress_bar=True)
    trainer.fit(Tiny(lr=0.125), loader())
    assert ", kind Tiny, rate 0.125" in capsys.readouterr().out
    assert bar.trainer is trainer


def test_a_progress_bar_that_is_switched_off_and_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bar = TQDMProgressBar(refresh_rate=3, process_position=2)
    assert (bar.refresh_rate, bar.process_position, bar.is_enabled) == (3, 2, True)
    for switch, shows in ((bar.disable, False), (bar.enable, True)):
        switch()
        assert bar.is_disabled is not shows
        quiet_trainer(tmp_path, bar, max_epochs=1, enable_progress_bar=True).fit(Tiny(), loader())
        assert ("epoch 0" in capsys.readouterr().out) is shows


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
def test_a_progress_bar_with_the_arguments_of_lightning(kind: Any, tmp_path: Path, capsys: Any) -> None:
    for rate in (0, 20):
        bar = kind(refresh_rate=rate, leave=True)
        assert isinstance(bar, ProgressBar)
        quiet_trainer(tmp_path, bar, max_epochs=1, enable_progress_bar=True).fit(Tiny(), loader())
        shown = re.search(r"epoch 0/0: | epoch  +step ", capsys.readouterr().out)
        assert (shown is not None) is (rate > 0)
    with refuses(ConfigurationError, "refresh_rate=-1"):
        kind(refresh_rate=-1)


def test_lines_printed_through_a_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    ProgressBar().print("seen", 3, sep=": ")
    assert capsys.readouterr().out == "seen: 3\n"


def test_arguments_of_the_console(tmp_path: Path) -> None:
    with (tmp_path / "console").open("w") as file:
        bar = RichProgressBar(console_kwargs={"file": file, "width": 60})
        quiet_trainer(tmp_path, bar, max_epochs=1, enable_progress_bar=True).fit(Tiny(), loader())
    assert " epoch     step  train_loss  s/epoch" in (tmp_path / "console").read_text()
    theme: Any = object()
    with refuses(ConfigurationError, "RichProgressBar", "theme="):
        RichProgressBar(theme=theme)


def test_whether_a_schedule_accumulates() -> None:
    for scheduling, answer in (({0: 1}, False), ({0: 1, 4: 2}, True)):
        for kind in (theirs.GradientAccumulationScheduler, GradientAccumulationScheduler):
            assert kind(scheduling).going_to_accumulate_grad_batches() is answer
