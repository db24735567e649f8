"""Error messages for wrong arguments and names: at most six lines, no frames of phalanx, and the exit code."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from ranks import run_script

import phalanx

ROOT = Path(phalanx.__file__).parent
MOST_LINES = 6
WRONG, REFUSED = 78, 65
SETUP = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from phalanx import Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint

class Model(TrainModule):
    def __init__(self, width=2):
        super().__init__()
        self.net = nn.Linear(4, width)
    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.net(batch[0]).square().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(verbose=False, default_root_dir=sys.argv[1], max_epochs=2)
cpu = dict(accelerator="cpu", logger=False, **quiet)

data = DataLoader(TensorDataset(torch.randn(12, 4)), 4)
"""
SAVED = "first = Trainer(**cpu); first.fit(Model(), data); first.save_checkpoint(sys.argv[1] + '/a.ckpt')\n"


class Mistake(NamedTuple):
    """A script with a mistake, and what has to be printed about it."""

    code: str
    words: list[str]
    exit_code: int = WRONG


MISTAKES = {
    "strategy": Mistake("Trainer(**cpu, strategy='dpd')", ["strategy='dpd'", "Did you mean 'ddp'?"]),
    "monitor": Mistake(
        "Trainer(**cpu, callbacks=ModelCheckpoint(monitor='perplexity')).fit(Model(), data, data)",
        ["'perplexity'", "was not logged", "val/loss"], 1,
    ),
    "another model": Mistake(
        SAVED + "Trainer(**cpu).fit(Model(3), data, ckpt_path=sys.argv[1] + '/a.ckpt')",
        ["a.ckpt", "net.weight", "(2, 4)", "(3, 4)", "strict_loading = False"], REFUSED,
    ),
    "PHALANX_PROGRESS": Mistake(
        "import os; os.environ['PHALANX_PROGRESS'] = 'plian'; Trainer(**cpu).fit(Model(), data)",
        ["PHALANX_PROGRESS='plian'", "Did you mean 'plain'?"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_script_is_explained_in_a_few_lines(name: str, tmp_path: Path) -> None:
    code, words, exit_code = MISTAKES[name]
    # One of them in an interpreter that has imported nothing yet.
    done = run_script(f"{SETUP}{code}\n", str(tmp_path), is_new=name == "strategy")
    printed = done.stdout
    lines = printed.strip().splitlines()
    assert 0 < len(lines) <= MOST_LINES, printed
    assert f'File "{ROOT}' not in printed
    # The line of the script, which a traceback shows, has the mistake in it, too.
    message = "\n".join(line for line in lines if not line.startswith(" "))
    assert [word for word in words if word not in message] == [], printed
    assert done.returncode == exit_code
