"""A GPT divided over a pipeline of ranks, trained on the source code of Python's standard library.

    python examples/pipeline.py
    python examples/pipeline.py --devices 4 --pp 2 --schedule zero-bubble
    python examples/pipeline.py --layers 8 --steps 1000

The module is written for one device, as in ``gpt.py``. ``parallel={"pp": 2}`` divides its blocks over two ranks, and
the micro-batches of an accumulation window pass through them one after another: while one rank computes the second
half of the model on the first micro-batch, the other computes the first half on the second one. The more micro-batches
in a window, the less do ranks wait for one another: ``(p - 1) / (n + p - 1)`` of the time for ``n`` of them on ``p``
ranks.

All sequences have the same length, cut from one long text: a pipeline exchanges hidden states of one shape.
"""

from __future__ import annotations

import argparse
import math

import torch
from gpt import END, GPT, VOCABULARY, cosine_with_warmup, standard_library
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import Trainer, TrainModule, seed_everything
from phalanx.loggers import CSVLogger
from phalanx.strategies import PipelineStrategy


class LanguageModel(TrainModule):
    """Predicts the next character. The blocks of its GPT are divided; their list is found by itself."""

    def __init__(self, layers: int, width: int, context: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT(layers, width, heads=4, context=context)

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean loss over the characters of rows ``[batch, context + 1]``."""
        logits = self.gpt(rows[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch[0].long())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch[0].long()), prog_bar=True)

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.01)
        schedule = cosine_with_warmup(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def load_data(context: int, batch_size: int, short: bool) -> tuple[DataLoader[list[Tensor]], DataLoader[list[Tensor]]]:
    """Return the loaders for training and validation; every 20th row is used for validation."""
    text = chr(END).join(standard_library(num_files=20 if short else None))
    length = context + 1
    rows = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    rows = rows[: len(rows) // length * length].view(-1, length)
    is_kept = torch.arange(len(rows)) % 20 > 0
    training, validation = TensorDataset(rows[is_kept]), TensorDataset(rows[~is_kept])
    # Without the last batch of an epoch, which would be smaller than the others of its window.
    return DataLoader(training, batch_size, shuffle=True, drop_last=True), DataLoader(validation, batch_size)  # type: ignore[arg-type]


def main() -> None:
    """Train, validate, and print a sample of the model."""
    parser = argparse.ArgumentParser(description="Train a GPT in a pipeline.")
    parser.add_argument("--devices", type=int, default=2, help="number of ranks on this machine")
    parser.add_argument("--pp", type=int, default=2, help="ranks of a pipeline; the others train replicas of it")
    parser.add_argument("--schedule", default="1f1b", help="such as gpipe, 1f1b, interleaved-1f1b or zero-bubble")
    parser.add_argument("--window", type=int, default=8, help="micro-batches of an optimizer step")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=128, help="length of a sequence in characters")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences of a micro-batch")
    parser.add_argument("--out", default="runs", help="directory for logs and checkpoints")
    parser.add_argument("--short", action="store_true", help="train a tiny model for a few steps, as a quick check")
    options = parser.parse_args()
    if options.short:
        options.steps, options.width, options.context = 16, 32, 48
    seed_everything(1)
    training, validation = load_data(options.context, options.batch_size, options.short)
    trainer = Trainer(
        accelerator="cpu" if torch.cuda.device_count() < options.devices else "auto",
        strategy=PipelineStrategy(options.schedule),
        parallel={"pp": options.pp},
        devices=options.devices,
        max_steps=options.steps,
        accumulate_grad_batches=options.window,
        gradient_clip_val=1.0,
        limit_val_batches=20,
        log_every_n_steps=10,
        default_root_dir=options.out,
        logger=CSVLogger(name="pipeline"),
    )
    model = LanguageModel(options.layers, options.width, options.context)
    trainer.fit(model, training)
    [result] = trainer.validate(model, validation, verbose=False)
    trainer.print(
        f"validation loss: {result['val_loss']:.3f} nats a character, against {math.log(VOCABULARY):.3f} for guessing"
    )
    trainer.print(f"logs and checkpoints: {trainer.run_dir}")
    if trainer.is_global_zero:
        # Rank 0 has the full model after a stage.
        print(f"--- sample\n{model.gpt.sample(40 if options.short else 300)}")


if __name__ == "__main__":
    main()
