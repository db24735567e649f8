"""Train a small transformer on the source of Python's standard library: each byte predicts the next one."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from phalanx import DataModule, Trainer, TrainModule


class Source(DataModule):
    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        text = b"".join(file.read_bytes() for file in sorted(Path(os.__file__).parent.glob("*.py")))
        rows = torch.frombuffer(bytearray(text[: len(text) // 129 * 129]), dtype=torch.uint8).view(-1, 129)
        return DataLoader(TensorDataset(rows.long()), batch_size=32, shuffle=True)


class LanguageModel(TrainModule):
    def __init__(self, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(128, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.blocks, self.head = nn.TransformerEncoder(block, layers), nn.Linear(width, 256)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        hidden = self.tokens(batch[0][:, :-1]) + self.positions.weight
        mask = nn.Transformer.generate_square_subsequent_mask(hidden.shape[1], device=hidden.device)
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[0][:, 1:].flatten())
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    Trainer(max_steps=100, log_every_n_steps=10, gradient_clip_val=1.0).fit(LanguageModel(), datamodule=Source())
