"""The names of Lightning's callbacks: each one exists here, or its import says what to use instead."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from messages import refuses
from small_fits import Tiny, loader, quiet_trainer

from phalanx import callbacks
from phalanx.callbacks import Callback, ModelSummary, ProgressBar, RichModelSummary, RichProgressBar, TQDMProgressBar
from phalanx.framework.core.errors import ConfigurationError

# The names without a counterpart.
ABSENT = {
    "BatchSizeFinder",
    "Checkpoint",
    "LearningRateFinder",
    "ModelPruning",
    "SpikeDetection",
}


def test_every_callback_of_lightning_exists_or_says_what_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    # Lightning sets this variable when it is imported.
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    names = set(import_module("lightning.pytorch.callbacks").__all__)
    assert names >= ABSENT
    for name in names - ABSENT:
        assert issubclass(getattr(callbacks, name), Callback)


@pytest.mark.parametrize("name", sorted(ABSENT))
def test_an_absent_name_is_documented_and_its_import_says_what_to_use(name: str) -> None:
    with refuses(ImportError, name):
        exec(f"from phalanx.callbacks import {name}")
    page = Path(callbacks.__file__).parents[1] / "docs" / "migrating-from-lightning.md"
    assert f"`{name}`" in page.read_text()


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


def test_the_rich_summary_is_the_summary(tmp_path: Path, capsys: Any) -> None:
    printed = []
    for kind in (RichModelSummary, ModelSummary):
        settings = {"max_epochs": 1, "enable_model_summary": True, "barebones": False}
        quiet_trainer(tmp_path, kind(max_depth=1), **settings).fit(Tiny(), loader())
        printed.append(capsys.readouterr().out)
    assert "layer" in printed[0]
    assert printed[0] == printed[1]
