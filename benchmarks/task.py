"""The task of all sides: the models, their batches and optimizer, and the description of one fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VALIDATION_BATCHES = 8
LOG_EVERY = 50
_WIDTH = 32
_REPEATED = 4096

Batch = tuple[Tensor, ...]


class Net(nn.Module):
    """Four small parameter tensors, so that a step is mostly overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 2))

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of inputs [batch, features] and labels [batch]."""
        inputs, labels = batch
        return nn.functional.cross_entropy(self.layers(inputs), labels)


class Block(nn.Module):
    """Attention and a perceptron, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the next hidden states [batch, length, width]."""
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.mix(self.norm_attention(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        widened: Tensor = x + self.mlp(self.norm_mlp(x))
        return widened


class GPT(nn.Module):
    """A GPT with tied embeddings."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        for embedding in (self.embed, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of predicting each next token of [batch, length], computed in fp32."""
        (tokens,) = batch
        x = self.embed(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()
        # Moving the targets, and not the logits, avoids a copy of the logits.
        targets = nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Size:
    """A GPT and its batches of tokens [rows, length]."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    rows: int
    learning_rate: float

    @property
    def elements(self) -> int:
        """The number of parameters, of which the embedding and the head share theirs."""
        block = 12 * self.width**2 + 13 * self.width
        return self.layers * block + (self.vocabulary + self.length) * self.width + 2 * self.width


SIZES = {
    "tiny": Size(2, 32, 2, 128, 32, 2, 3e-3),
    "0.9m": Size(4, 128, 4, 512, 64, 8, 1e-3),
    "small": Size(2, 128, 4, 512, 64, 1, 3e-3),
    "350m": Size(24, 1024, 16, 50304, 2048, 4, 3e-4),
    "1.3b": Size(24, 2048, 16, 50304, 2048, 4, 3e-4),
}


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Job:
    """One fit: what a side has to train, and how."""

    steps: int
    """Micro-batches of each rank in an epoch."""
    epochs: int = 1
    everyday: bool = False
    """The loss of each step in a CSV file; after each epoch validation, a checkpoint, and early stopping."""
    values: int = 0
    """Number of scalars that are logged in every step, and written every ``LOG_EVERY`` steps."""
    model: str = "net"
    """``net``, or one of ``SIZES``."""
    ranks: int = 1
    strategy: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of DeepSpeed."""
    accumulate: int = 1
    """For the raw loop and the Trainers."""
    device: str = "cpu"
    precision: str = "32-true"
    compiled: bool = False
    directory: Path = Path()
    mark: Callable[[], object] = _nothing
    """Called at the start of each step."""
    keep: Callable[[Tensor], object] | None = None
    """Called with the loss of each step, if there is one."""
    different: int = 4
    """Number of different batches of tokens."""
    network: Callable[[], nn.Module] | None = None
    """Builds another model than ``model``."""
    batches: Callable[[int], Any] | None = None
    """Returns the batches of another model, given their number."""


def build(job: Job) -> nn.Module:
    """Return the model on its device, with the same weights in each call."""
    torch.manual_seed(0)
    with torch.device(job.device):
        if job.network is not None:
            return job.network()
        if job.model == "net":
            return Net()
        size = SIZES[job.model]
        return GPT(size.layers, size.width, size.heads, size.vocabulary, size.length)


def optimizer_of(module: nn.Module, job: Job) -> torch.optim.Optimizer:
    """Return torch's AdamW, fused on a GPU."""
    rate = 1e-3 if job.model == "net" else SIZES[job.model].learning_rate
    fused = True if job.device == "cuda" else None
    return torch.optim.AdamW(module.parameters(), lr=rate, fused=fused)


class Rows(Dataset[Batch]):
    """Rows that exist already, and are read as whole batches, so that loading costs little."""

    def __init__(self, tensors: Batch, count: int) -> None:
        self._tensors, self._count = tensors, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        """Return one row."""
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        """Return a batch."""
        first = indices[0] % len(self._tensors[0])
        if indices[-1] - indices[0] == len(indices) - 1:
            return tuple(tensor[first : first + len(indices)] for tensor in self._tensors)
        chosen = [index % len(self._tensors[0]) for index in indices]
        return tuple(tensor[chosen] for tensor in self._tensors)


def _as_it_is(batch: Any) -> Any:
    return batch


def loader_of(job: Job, batches: int | None = None) -> Any:
    """Return the loader of an epoch of all ranks, or of fewer ``batches``, in the same order in every call."""
    if job.batches is not None:
        return job.batches(job.steps if batches is None else batches)
    generator, rows = torch.Generator().manual_seed(0), 16
    if job.model == "net":
        inputs = torch.randn(_REPEATED, _WIDTH, generator=generator)
        made: Batch = (inputs, torch.randint(0, 2, (_REPEATED,), generator=generator))
    else:
        size = SIZES[job.model]
        rows = size.rows
        made = (torch.randint(size.vocabulary, (job.different * rows, size.length), generator=generator),)
    count = (job.steps if batches is None else batches) * job.ranks * rows
    return DataLoader(Rows(made, count), batch_size=rows, collate_fn=_as_it_is, pin_memory=job.device == "cuda")
