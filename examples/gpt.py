"""A small GPT, trained on the source code of Python's standard library.

    python examples/gpt.py
    python examples/gpt.py --strategy ddp --devices 2 --precision bf16-mixed
    python examples/gpt.py --steps 2000 --layers 6 --width 256

The text is read from the files of the running interpreter, so nothing is downloaded. A document is a paragraph of
source code. Documents differ in length, so batches are padded. The loss of a batch is the mean over its tokens without
padding, and ``batch_weight`` returns the number of these tokens. The update is therefore that of the mean over all
tokens of the optimizer step, however they are distributed over micro-batches and ranks.

The example also shows an accumulation schedule that increases the batch size during training, a cosine learning-rate
schedule by optimizer step, and gradient clipping.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from phalanx import AccumulationSchedule, Trainer, TrainModule, seed_everything
from phalanx.callbacks import LearningRateMonitor
from phalanx.loggers import CSVLogger

VOCABULARY = 128  # ASCII
END = 0  # the first and last token of each document
NO_TARGET = -100  # the default ignore_index of cross_entropy

Batch = tuple[Tensor, Tensor]


class GPT(nn.Module):
    """A decoder-only transformer over characters (Radford et al. 2019), with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits ``[batch, sequence, vocabulary]`` for tokens ``[batch, sequence]``."""
        hidden = self.tokens(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.linear(self.norm(hidden), self.tokens.weight)

    @torch.no_grad()
    def sample(self, length: int, prompt: str = "def ", temperature: float = 0.7) -> str:
        """Return ``prompt`` continued by up to ``length`` characters."""
        device = self.tokens.weight.device
        tokens = [END, *prompt.encode()]
        for _ in range(length):
            logits = self(torch.tensor([tokens[-self.context :]], device=device))[0, -1].float()
            token = int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1))
            if token == END:
                break
            tokens.append(token)
        return bytes(tokens[1:]).decode("ascii")


class Block(nn.Module):
    """A transformer block: self-attention and a two-layer network, with pre-normalization and residual connections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_qkv, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden states ``[batch, sequence, width]`` for ``hidden`` of the same shape."""
        batch, sequence, width = hidden.shape
        qkv = self.to_qkv(self.norm1(hidden)).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.from_heads(mixed.transpose(1, 2).reshape(batch, sequence, width))
        expanded: Tensor = self.contract(nn.functional.gelu(self.expand(self.norm2(hidden))))
        return hidden + expanded


class LanguageModel(TrainModule):
    """Trains a GPT."""

    def __init__(
        self, layers: int = 3, width: int = 96, heads: int = 4, context: int = 128, learning_rate: float = 3e-3
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.gpt = GPT(layers, width, heads, context)

    def batch_weight(self, batch: Batch) -> Tensor:
        return num_tokens(batch)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        tokens, targets = batch
        loss = token_loss(self.gpt(tokens), targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        tokens, targets = batch
        self.log("val_loss", token_loss(self.gpt(tokens), targets), prog_bar=True, batch_size=num_tokens(batch))

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.learning_rate, weight_decay=0.01)
        schedule = cosine_with_warmup(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def token_loss(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Return the mean loss over all tokens but padding; with ``"none"``, the loss of each token (0 for padding)."""
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction=reduction
    )
    return loss if reduction == "mean" else loss.view_as(targets)


def num_tokens(batch: Batch) -> Tensor:
    """Return the number of targets of a batch that are not padding."""
    return (batch[1] != NO_TARGET).sum()


def cosine_with_warmup(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a schedule with linear warmup for a twentieth of ``steps``, then cosine decay to a tenth."""
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def standard_library(num_files: int | None = None) -> Iterator[str]:
    """Yield the paragraphs of the modules of the standard library, in alphabetical order of the files."""
    folder = Path(sysconfig.get_path("stdlib"))
    for path in sorted(folder.glob("*.py"))[:num_files]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield from (paragraph for paragraph in text.split("\n\n") if paragraph.isascii() and len(paragraph) > 20)


def documents(context: int, num_files: int | None = None) -> list[Tensor]:
    """Return the tokens of each paragraph, between two END tokens and truncated to ``context`` characters."""
    texts = standard_library(num_files)
    return [torch.tensor([END, *text[: context - 1].encode(), END], dtype=torch.uint8) for text in texts]


def collate(items: Sequence[Tensor]) -> Batch:
    """Return inputs and targets, padded to the longest item, as two tensors ``[batch, sequence]``."""
    rows = [item.long() for item in items]
    inputs = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True, padding_value=END)
    targets = nn.utils.rnn.pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=NO_TARGET)
    return inputs, targets


def load_data(context: int, batch_size: int, short: bool) -> tuple[DataLoader[Tensor], DataLoader[Tensor]]:
    """Return the loaders for training and validation. Every 40th paragraph is used for validation."""
    texts = documents(context, num_files=20 if short else None)
    validation = texts[::40]
    training = [text for index, text in enumerate(texts) if index % 40]
    return (
        DataLoader(training, batch_size, shuffle=True, collate_fn=collate),  # type: ignore[arg-type]
        DataLoader(validation, batch_size, collate_fn=collate),  # type: ignore[arg-type]
    )


def arguments(description: str) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--strategy", default="auto", help="how to distribute work over ranks, such as single or ddp")
    parser.add_argument("--devices", default="auto", help="number of ranks on this machine")
    parser.add_argument("--precision", default="32-true", help="such as 32-true or bf16-mixed")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--context", type=int, default=128, help="maximum length of a sequence in characters")
    parser.add_argument("--batch-size", type=int, default=16, help="documents per micro-batch on each rank")
    parser.add_argument("--out", default="runs", help="directory for logs and checkpoints")
    parser.add_argument("--short", action="store_true", help="train a tiny model for a few steps, as a quick check")
    options = parser.parse_args()
    if options.short:
        options.steps, options.layers, options.width, options.context = 24, 1, 32, 64
    return options


def main() -> None:
    """Train, validate, and print a sample of the model."""
    options = arguments("Train a small GPT on the source text of Python's standard library.")
    seed_everything(1)
    training, validation = load_data(options.context, options.batch_size, options.short)
    # Start with small batches. Increase the batch size when the gradient noise exceeds the gradient itself.
    schedule = AccumulationSchedule({0: 1, options.steps // 2: 2, options.steps * 3 // 4: 4}, unit="step")
    trainer = Trainer(
        strategy=options.strategy,
        devices=options.devices,
        precision=options.precision,
        max_steps=options.steps,
        accumulate_grad_batches=schedule,
        gradient_clip_val=1.0,
        val_check_interval=max(1, options.steps // 2),
        check_val_every_n_epoch=None,
        limit_val_batches=20,
        log_every_n_steps=10,
        default_root_dir=options.out,
        logger=CSVLogger(name="gpt"),
        callbacks=[LearningRateMonitor("step")],
    )
    model = LanguageModel(options.layers, options.width, context=options.context)
    trainer.fit(model, training, validation)
    [result] = trainer.validate(model, validation, verbose=False)

    loss = result["val_loss"]
    trainer.print(f"validation loss: {loss:.3f} nats a character, against {math.log(VOCABULARY):.3f} for guessing")
    trainer.print(f"logs and checkpoints: {trainer.run_dir}")
    if trainer.is_global_zero:
        model.eval()
        print(f"--- sample\n{model.gpt.sample(40 if options.short else 300)}")


if __name__ == "__main__":
    main()
