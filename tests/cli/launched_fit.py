"""A fit on two ranks that records its losses, for ``phalanx launch``; a rank may end itself on the way.

launched_fit.py FOLDER [kill|raise|end RANK STEP]     in the first attempt only; "end": once the step is done
launched_fit.py FOLDER long                           until it is preempted
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint

SAMPLES, BATCH, STEPS = 24, 2, 6
INPUTS = torch.arange(2.0 * SAMPLES).reshape(SAMPLES, 2) / (2 * SAMPLES)


class Model(TrainModule):
    """A linear layer."""

    def __init__(self, losses: Path, fault: list[str]) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.losses, self.fault = losses, fault

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        self.fail("kill", "raise")
        with (self.losses / f"losses_{self.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps([self.global_step, loss.item()]) + "\n")
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.fail("end")
        if self.fault == ["long"]:
            time.sleep(0.01)

    def fail(self, *kinds: str) -> None:
        """End this rank if one of these faults is due."""
        if self.fault and self.fault[0] in kinds and self.fault[1:] == [str(self.global_rank), str(self.global_step)]:
            if self.fault[0] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("planted")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def by_hand() -> list[float]:
    """Return the losses of the same training in plain torch, on one process."""
    torch.manual_seed(0)
    net, losses = nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    # Each rank takes every second sample, two of them in a batch.
    for batch in INPUTS.split(2 * BATCH):
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def recorded(folder: Path, rank: int) -> dict[int, float]:
    """Return the loss of each step on a rank, the last one of a step that was trained again."""
    lines = (folder / f"losses_{rank}.jsonl").read_text().splitlines()
    return dict(map(json.loads, lines))


def main() -> None:
    """Fit."""
    folder, *fault = sys.argv[1:]
    torch.manual_seed(0)
    model = Model(Path(folder), fault if os.environ["PHALANX_ATTEMPT"] == "0" else [])
    saver = ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(
        max_epochs=-1 if fault == ["long"] else 1,
        accelerator="cpu",
        devices="auto",
        strategy="ddp",
        callbacks=[saver],
        default_root_dir=folder,
        **quiet,
    )
    trainer.fit(model, DataLoader(TensorDataset(INPUTS), batch_size=BATCH))


if __name__ == "__main__":
    main()
