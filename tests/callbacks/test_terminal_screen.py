"""The output of a fit in terminals of several widths and kinds: the progress bar, the epoch table, and the boxes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import run_script
from screens import drawn_lines, run_in_screen, screen_of

METRICS = ("val/loss", "val/accuracy", "val/precision", "val/recall", "val/a_metric_with_a_long_name")
SOURCE = f"""
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from phalanx import Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint, ProgressBar

class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.example_input_array = torch.ones(2, 4)
    def forward(self, rows):
        return self.net(rows)
    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean()
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss
    def validation_step(self, batch, index):
        for name in {METRICS}:
            self.log(name, 1 / (1 + self.current_epoch), prog_bar=True)
    def test_step(self, batch, index):
        for name in {METRICS}:
            self.log(name, 7.0)
    def predict_step(self, batch, index):
        return self.net(batch[0])
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

if __name__ == "__main__":
    root, devices = sys.argv[1:]
    trainer = Trainer(
        accelerator="cpu", devices=int(devices), max_epochs=3, default_root_dir=root, logger=False,
        callbacks=[ModelCheckpoint(monitor="val/loss"), ProgressBar(refresh_seconds=1e-9)],
    )
    data, model = DataLoader(TensorDataset(torch.randn(16, 4)), 4), Model()
    trainer.fit(model, data, data)
    trainer.validate(model, data)
    trainer.test(model, data)
    trainer.predict(model, data)
"""
BAR = "━"


@pytest.mark.parametrize(("columns", "metrics"), [(40, 1), (80, 3)])
def test_nothing_is_wider_than_the_terminal(columns: int, metrics: int, tmp_path: Path) -> None:
    written = run_in_screen(SOURCE, columns, tmp_path, str(tmp_path), "1")
    # Paths and commands are not folded, so that they can be copied. They are below the last box, with two spaces.
    below = re.compile(r"  (checkpoint|report|resume|curves|   ) ")
    assert [line for line in drawn_lines(written) if len(line) > columns and not below.match(line)] == []
    for label in ("sanity check", "epoch 0/2", "epoch 2/2", "validation", "test", "prediction"):
        assert f"{label} " in written, label
        assert any(line.startswith(label) and BAR in line for line in drawn_lines(written)), label
    screen = screen_of(written)
    assert not any(BAR in line for line in screen)
    (header,) = (line for line in screen if line.startswith(" epoch "))
    shown = [name for name in ("train/loss", *METRICS) if f" {name} " in header]
    assert len(shown) == metrics
    assert "val/loss" in shown
    rows = screen[screen.index(header) + 1 :][:3]
    assert [row.split()[:2] for row in rows] == [["0", "4"], ["1", "8"], ["2", "12"]]
    assert all(row.endswith("*") and len(row) == len(header) for row in rows)
    boxes = [line for line in screen if line[:1] in ("┌", "│", "└")]
    assert len(boxes) > 6
    assert all(line[-1] in "┐│┘" for line in boxes)
    assert "32" in colours_in(written)


def test_two_ranks_show_the_same_once(tmp_path: Path) -> None:
    written = run_in_screen(SOURCE, 80, tmp_path, str(tmp_path), "2")
    screen = screen_of(written)
    assert [line for line in screen if BAR in line] == []
    assert any(line.startswith("epoch 0/2") and BAR in line for line in drawn_lines(written))
    rows = [line for line in screen if line.endswith(" *")]
    assert [row.split()[:2] for row in rows] == [["0", "2"], ["1", "4"], ["2", "6"]]
    text = [line for line in screen if line and not line.startswith(("---", "┌", "└"))]
    assert [line for line in text if text.count(line) > 1] == []


def colours_in(written: str) -> set[str]:
    """Return the codes of colours in the output."""
    codes = {code for codes in re.findall(r"\x1b\[([0-9;]*)m", written) for code in codes.split(";")}
    # These ones reset, or make text bold.
    return codes - {"", "0", "1"}


def test_no_colours_are_shown_if_they_are_not_wanted(tmp_path: Path) -> None:
    written = run_in_screen(SOURCE, 80, tmp_path, str(tmp_path), "1", env={"NO_COLOR": "1"})
    assert any(line.startswith("epoch 0/2") and BAR in line for line in drawn_lines(written))
    assert colours_in(written) == set()


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"PHALANX_PROGRESS": "plain"}])
def test_a_terminal_without_a_cursor_shows_lines(env: dict[str, str], tmp_path: Path) -> None:
    written = run_in_screen(SOURCE, 80, tmp_path, str(tmp_path), "1", env=env)
    assert "\x1b" not in written
    assert len([line for line in drawn_lines(written) if re.match(r"epoch \d/2: 4 batches in ", line)]) == 3


def test_progress_is_off_where_it_is_switched_off(tmp_path: Path) -> None:
    written = run_in_screen(SOURCE, 80, tmp_path, str(tmp_path), "1", env={"PHALANX_PROGRESS": "off"})
    assert BAR not in written
    assert " batches in " not in written
    assert "trained    12 optimizer steps" in written


def test_a_pipe_gets_no_control_sequences_unless_asked_for(tmp_path: Path) -> None:
    piped = run_script(SOURCE, str(tmp_path), "1").stdout
    assert "\x1b" not in piped
    assert len(re.findall(r"^epoch \d/2: 4 batches in ", piped, re.MULTILINE)) == 3
    assert "validate: val/a_metric_with_a_long_name = 0.25, val/accuracy = " in piped
    forced = run_script(SOURCE, str(tmp_path), "1", env={"PHALANX_PROGRESS": "rich"}).stdout
    assert "\x1b[2K" in forced
    assert BAR in forced
