"""The run that ``kill_trials.py`` kills: ``kill_run.py ROOT STRATEGY RANKS ASYNCHRONOUS WORKERS``.

STRATEGY may have degrees, as in ``"fsdp tp=2"``. With a sixth argument the run is in a bucket, below this URL.

A checkpoint after every optimizer step, a validation every few batches, dropout, shuffling, a schedule of windows, and
every loss in ``metrics.csv``. What it comes to is written to ``ROOT/result.json``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import AccumulationSchedule, Callback, Trainer, TrainModule, seed_everything
from phalanx.callbacks import ModelCheckpoint
from phalanx.framework.core.errors import StorageError
from phalanx.loggers import CSVLogger

STARTED, OVER, RESULT, STEPS = "started", "over", "result.json", "steps"


class Net(TrainModule):
    """A model that draws random numbers and has buffers."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.ReLU()) for _ in range(3)]
        self.net = nn.Sequential(nn.Linear(6, 32), *blocks, nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_tensor_parallel(self, mesh: Any) -> dict[str, Any]:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel

        return {f"net.{block}.0": ColwiseParallel(output_layouts=Replicate()) for block in (1, 2, 3)}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Started(Callback):
    """Tells who watches that training begins, and makes a step take as long as it does with a model of some size."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_start(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            (self.root / STARTED).touch()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        time.sleep(0.005)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # One line for each micro-batch; what is computed again is there twice.
        if trainer.is_global_zero:
            with contextlib.suppress(OSError), (self.root / STEPS).open("a") as file:
                file.write(f"{trainer.current_epoch}/{batch_idx}\n")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        # The last a fit does before it gives signals back to the script.
        with contextlib.suppress(OSError):
            (self.root / OVER).touch()


def train(root: Path, named: str, ranks: int, samples: int, workers: int = 0, **settings: Any) -> None:
    """Train two epochs, from where the newest good checkpoint stands, and write the result.

    Args:
        root: the folder of the result, and of the run unless ``settings`` has another one.
        named: the strategy, with degrees after a space.
        ranks: their number.
        samples: those of an epoch.
        workers: those of the loader.
        settings: arguments of the Trainer.
    """
    strategy, _, degrees = named.partition(" ")
    # All generators, whose states are compared too.
    seed_everything(5)
    x = torch.randn(samples, 6)
    data = TensorDataset(x, x.sum(1, keepdim=True))
    module = Net()
    arguments: dict[str, Any] = {"default_root_dir": root, **settings}
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=ranks,
        parallel=degrees or None,
        max_epochs=2,
        logger=CSVLogger(),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        # Ranks of a pipeline work at the same time from two micro-batches on.
        accumulate_grad_batches=AccumulationSchedule.cycle([1, 4] if strategy == "pipeline" else [1, 2]),
        **arguments,
    )
    # The batch norm needs two samples.
    loader = DataLoader(data, max(2, 4 // ranks), shuffle=True, num_workers=workers)
    trainer.fit(module, loader, DataLoader(data, 60), ckpt_path="auto")
    write_result(root, trainer, module)


def main() -> None:
    """Train, with a checkpoint after each step."""
    root, strategy, ranks = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    asynchronous, workers = sys.argv[4] == "1", int(sys.argv[5])
    saver = ModelCheckpoint(
        monitor="val", save_top_k=2, save_last=True, every_n_train_steps=1, asynchronous=asynchronous
    )
    bucket = {"default_root_dir": sys.argv[6]} if len(sys.argv) > 6 else {}
    callbacks = [saver, Started(root)]
    train(root, strategy, ranks, 120, workers, val_check_interval=9, callbacks=callbacks, **bucket)


def write_result(root: Path, trainer: Trainer, module: TrainModule) -> None:
    """Write the outcome of a fit: a hash of the weights, the metrics and the number of steps."""
    if trainer.is_global_zero:
        tensors = b"".join(tensor.detach().numpy().tobytes() for tensor in module.state_dict().values())
        metrics = {name: value.item() for name, value in sorted(trainer.callback_metrics.items())}
        result = {"weights": hashlib.sha256(tensors).hexdigest(), "metrics": metrics, "steps": trainer.global_step}
        try:
            (root / RESULT).write_text(json.dumps(result))
        except OSError as error:
            # On a full disk this fails like any other save.
            raise StorageError(f"no result: {error}") from error


if __name__ == "__main__":
    main()
