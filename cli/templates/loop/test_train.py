"""The loop learns, and what it saves can be loaded. Start with ``pytest``."""

from pathlib import Path

import pytest
from train import train

from phalanx import Fabric, checkpoint


def test_most_digits_are_recognized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert train(Fabric(accelerator="cpu", devices=1), epochs=3, width=64) > 0.85
    assert checkpoint.weights(tmp_path / "digits.ckpt")["0.weight"].shape == (64, 64)
