"""A GPT over long sequences, each of which several ranks share (context parallelism).

    python examples/long_context.py
    python examples/long_context.py --devices 2 --parallel cp=2
    python examples/long_context.py --devices 4 --strategy fsdp --parallel cp=2,dp_shard=2 --context 4096

The text is the source code of Python's standard library, read from the files of the running interpreter. A sequence is
a piece of a module of 2,048 characters. With ``--parallel cp=2`` two ranks read the same sequences, and each computes
half of the positions: ``cut_sequences`` returns its part of a batch, and attention covers the full sequences all the
same. So the activations of a rank are halved, and the model that is trained is the same for any number of ranks.

The last piece of a module is padded with targets that do not count. Its padding is in the last part, so parts have
different numbers of targets, and ``batch_weight`` returns that of the part.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpt import (  # type: ignore[import-not-found,unused-ignore]  # beside this file
    END,
    NO_TARGET,
    VOCABULARY,
    Block,
    cosine_with_warmup,
    token_loss,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import Trainer, TrainModule, seed_everything
from phalanx.loggers import CSVLogger

if TYPE_CHECKING:
    from phalanx import SequencePart

Batch = tuple[Tensor, Tensor, Tensor]


class LongModel(TrainModule):
    """A decoder-only transformer over characters, which is given the positions of its tokens."""

    def __init__(self, layers: int, width: int, context: int, heads: int = 4, learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def cut_sequences(self, batch: tuple[Tensor, Tensor], part: SequencePart) -> Batch:
        """Return this rank's part: on a single rank all of the batch, and its positions."""
        tokens, targets = batch
        return part(tokens), part(targets), part.positions(tokens)

    def batch_weight(self, batch: Batch) -> Tensor:
        return (batch[1] != NO_TARGET).sum()

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of the targets that count."""
        tokens, targets, positions = batch
        hidden = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            hidden = block(hidden)
        return token_loss(nn.functional.linear(self.norm(hidden), self.tokens.weight), targets)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, batch_size=self.batch_weight(batch))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.01)
        schedule = cosine_with_warmup(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def sequences(context: int, num_files: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and targets, each [context], of the pieces of every module of the standard library."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:num_files]:
        text = path.read_text(encoding="utf-8", errors="ignore").encode("ascii", errors="ignore")
        whole = torch.tensor([END, *text, END], dtype=torch.long)
        for piece in whole.unfold(0, context + 1, context) if len(whole) > context else ():
            found.append((piece[:-1], piece[1:]))
        rest = whole[(len(whole) - 1) // context * context :]
        padding = (0, context - len(rest) + 1)
        if len(rest) > 1:
            tokens, targets = (
                nn.functional.pad(rest[:-1], padding),
                nn.functional.pad(rest[1:], padding, value=NO_TARGET),
            )
            found.append((tokens, targets))
    return found


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT over long sequences of Python source text.")
    parser.add_argument("--strategy", default="auto", help="ddp or fsdp")
    parser.add_argument("--devices", default="auto", help="number of ranks on this machine")
    parser.add_argument("--parallel", help="ranks along each axis, such as cp=2")
    parser.add_argument("--precision", default="32-true", help="such as 32-true or bf16-mixed")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=2048, help="length of a sequence in characters")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--out", default="runs", help="directory for logs and checkpoints")
    parser.add_argument("--short", action="store_true", help="train a tiny model for a few steps, as a quick check")
    options = parser.parse_args()
    if options.short:
        options.steps, options.layers, options.width, options.context = 20, 1, 32, 256
    return options


def main() -> None:
    """Train and validate."""
    options = arguments()
    seed_everything(1)
    found = sequences(options.context, num_files=8 if options.short else None)
    training = [piece for index, piece in enumerate(found) if index % 10]
    trainer = Trainer(
        strategy=options.strategy,
        devices=options.devices,
        parallel=options.parallel,
        precision=options.precision,
        max_steps=options.steps,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        default_root_dir=options.out,
        logger=CSVLogger(name="long_context"),
    )
    model = LongModel(options.layers, options.width, options.context)
    trainer.fit(model, DataLoader(training, options.batch_size, shuffle=True))  # type: ignore[arg-type]
    [result] = trainer.validate(model, DataLoader(found[::10], options.batch_size), verbose=False)  # type: ignore[arg-type]

    loss = result["val_loss"]
    trainer.print(f"validation loss: {loss:.3f} nats a character, against {math.log(VOCABULARY):.3f} for guessing")
    trainer.print(f"logs and checkpoints: {trainer.run_dir}")


if __name__ == "__main__":
    main()
