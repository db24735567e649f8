"""Output on streams that cannot encode all of it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from hostile import good
from ranks import run_script

from phalanx.cli.main import main
from phalanx.framework.system.console import encodable, folded, printable

FIT = """
import os
import sys

# A new interpreter does this by itself.
if (encoding := os.environ["PYTHONIOENCODING"]) != sys.stdout.encoding:
    sys.stdout, sys.stderr = (open(number, "w", encoding=encoding, closefd=False) for number in (1, 2))

import torch
from phalanx import Trainer, TrainModule
from phalanx.callbacks import ProgressBar
from torch.utils.data import DataLoader, TensorDataset

class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.βάρος = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.βάρος(batch[0]).square().mean()
        self.log("verlust/β", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_end(self):
        self.trainer.print("δ →")

trainer = Trainer(
    max_epochs=1, accelerator="cpu", devices=int(sys.argv[1]), logger="csv", default_root_dir=sys.argv[2],
    callbacks=[sys.argv[3]],
)
data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
trainer.fit(Model(), data)
"""


def test_text_is_changed_only_where_the_stream_cannot_encode_it() -> None:
    for encoding in ("utf-8", "cp437"):
        assert encodable("│ é │", io.TextIOWrapper(io.BytesIO(), encoding)) == "│ é │"
    assert encodable("│ é │", io.StringIO()) == "│ é │"
    assert encodable("┌─ é β ┐", io.TextIOWrapper(io.BytesIO(), "latin-1")) == r"+- é \u03b2 +"
    assert encodable("a\udcff", io.TextIOWrapper(io.BytesIO(), "utf-8")) == r"a\udcff"


def test_a_fit_prints_under_any_encoding(tmp_path: Path) -> None:
    environment = {"PYTHONIOENCODING": "ascii"}
    done = run_script(FIT, "2", str(tmp_path / "λ"), "progress_bar", env=environment, is_new=True)
    assert done.returncode == 0, done.stdout
    for part in ("+- phalanx -", r"verlust/\u03b2", r"\u03b4 \u2192", "| trained    "):
        assert part in done.stdout


def test_the_live_bar_under_an_encoding_without_its_characters(tmp_path: Path) -> None:
    # So narrow that rich cuts the text.
    environment = {"PYTHONIOENCODING": "ascii", "COLUMNS": "30"}
    done = run_script(FIT, "1", str(tmp_path), "rich_progress_bar", env=environment)
    assert done.returncode == 0, done.stdout
    assert "+- phalanx -" in done.stdout


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_the_command_prints_under_any_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    good(tmp_path / "β")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding))
    for command in (["list", str(tmp_path)], ["inspect", str(tmp_path / "β")], ["verify", str(tmp_path / "β")]):
        assert main(["checkpoint", *command]) == 0
    sys.stdout.flush()
    assert rb"\u03b2" in printed.getvalue()


def test_control_characters_are_escaped() -> None:
    assert printable("caf\u00e9 \u202e\x1b\ud800\n") == "caf\u00e9 \\u202e\\x1b\\ud800\\n"


def test_a_word_that_is_wider_than_a_line_can_be_kept_whole() -> None:
    line = f"resume: python {'x' * 12}"
    assert folded(line, 10, " ") == ["resume:", " python xx", " xxxxxxxxx", " x"]
    assert folded(line, 10, " ", breaks_words=False) == ["resume:", " python", f" {'x' * 12}"]
