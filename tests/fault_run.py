"""The run in which ``fault_trials.py`` plants exceptions: ``fault_run.py ROOT STRATEGY SITE``.

At its site one rank records the time and raises, on a line marked as planted. A callback records that
``on_exception`` ran, a logger how it was closed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fault_trials import HOOKS
from torch import nn
from torch.utils.data import DataLoader, Dataset

from phalanx import Callback, Trainer, TrainModule
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.distributed.world import placement
from phalanx.loggers import Logger

ROOT, STRATEGY, SITE = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
PLANTED, CAUGHT, CLOSED = "planted", "caught", "closed"


def plant(where: str, rank: int) -> None:
    """Raise at the chosen site; at sites that are passed with every batch only from the second time on."""
    if f"{where}:{rank}" != SITE:
        return
    seen = ROOT / f"seen-{where}"
    if where in ("training_step", "on_train_batch_end", "callback", "state_dict") and not seen.exists():
        seen.touch()
        return
    if not (ROOT / PLANTED).exists():
        (ROOT / PLANTED).write_text(repr(time.monotonic()))
    raise ValueError(f"a fault in {where}")  # planted


class Rows(Dataset[Any]):
    """Rows [4]; on one rank a worker fails to read the sixth."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        if index >= 10 and torch.utils.data.get_worker_info() is not None:
            plant("worker", placement().rank)
        return torch.full((4,), float(index))


class Faulty(TrainModule):
    """Raises in a step or in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        plant("training_step", self.global_rank)
        loss = self.net(batch).square().mean() * 1e-3
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        plant("validation_step", self.global_rank)
        self.log("val", self.net(batch).mean())

    def configure_optimizers(self) -> Any:
        plant("configure_optimizers", self.global_rank)
        return torch.optim.AdamW(self.parameters(), 1e-3)


def _hook(name: str) -> Any:
    def hook(self: Faulty, *args: Any) -> None:
        plant(name, self.global_rank)

    return hook


for _name in HOOKS:
    if _name != "configure_optimizers":
        setattr(Faulty, _name, _hook(_name))


class Watching(Callback):
    """Records that a run failed; raises on one rank alone."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        plant("callback_setup", trainer.global_rank)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        plant("callback", trainer.global_rank)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        plant("epoch_callback", trainer.global_rank)

    def state_dict(self) -> dict[str, Any]:
        plant("state_dict", placement().rank)
        return {"a": 1}

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        (ROOT / f"{CAUGHT}-{trainer.global_rank}").write_text(str(exception))


class Noting(Logger):
    """Records how it was closed; fails with its first metric where that is the site."""

    name = "noting"
    version = 0

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        plant("logger", 0)

    def finalize(self, status: str) -> None:
        (ROOT / CLOSED).write_text(status)


def fail_to_write(path: Any, *args: Any, **kwargs: Any) -> Any:
    """Fail to write a checkpoint with an unexpected error."""
    plant("save", placement().rank)
    return WRITE(path, *args, **kwargs)


def main() -> None:
    """Train, and fail."""
    workers = int(SITE.startswith("worker"))
    trainer = Trainer(
        accelerator="cpu",
        strategy=STRATEGY,
        devices=2,
        max_epochs=2,
        default_root_dir=ROOT,
        logger=Noting(),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watching(), ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)],
    )
    trainer.fit(Faulty(), DataLoader(Rows(), 2, num_workers=workers), DataLoader(Rows(), 4))


if __name__ == "__main__":
    WRITE = os.fsync
    os.fsync = fail_to_write  # type: ignore[assignment]
    main()
