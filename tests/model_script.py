"""The beginning of scripts that tests run: what they import, and a small module."""

from __future__ import annotations

MODEL = """
import os, signal, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from phalanx import Trainer, TrainModule

class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)

def loader(rows, batch_size=4, **options):
    return DataLoader(TensorDataset(torch.ones(rows, 4)), batch_size, **options)
"""
