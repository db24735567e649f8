"""The task of the cases about data: images in, and a network that takes about as long as copying them does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from .device import Device, Timer

_DIFFERENT = 4


@dataclass(frozen=True)
class Images:
    """Batches of images [rows, 3, side, side], uint8, and the network for them."""

    rows: int
    side: int
    patch: int
    width: int
    layers: int


IMAGES, TINY_IMAGES = Images(256, 224, 16, 384, 8), Images(4, 32, 16, 16, 2)


class Network(nn.Module):
    """Patches, residual perceptrons on each of them, and their mean; returns the mean loss of a batch."""

    def __init__(self, images: Images) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = images.width
        self.patches = nn.Conv2d(3, width, images.patch, images.patch)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(images.layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, batch: Tensor) -> Tensor:
        """Return the loss for images [rows, 3, side, side], uint8; all have the label 0."""
        x = self.patches(batch.float() / 255).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x)
        loss: Tensor = -self.head(x.mean(1)).float().log_softmax(-1)[:, 0].mean()
        return loss


class Prepared(Dataset[Tensor]):
    """Batches that were made before."""

    def __init__(self, images: Images, count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (images.rows, 3, images.side, images.side)
        self.made = [torch.randint(256, shape, dtype=torch.uint8, generator=generator) for _ in range(_DIFFERENT)]
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        """Return a batch; a worker copies it into shared memory."""
        if index >= self.count:
            raise IndexError(index)
        return self.made[index % _DIFFERENT]


class Slow(IterableDataset[Tensor]):
    """Batches in pinned memory, each of which takes some seconds to load."""

    def __init__(self, images: Images, count: int, seconds: float, pins: bool) -> None:
        self.made = [batch.pin_memory() if pins else batch for batch in Prepared(images, _DIFFERENT).made]
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(self.count):
            time.sleep(self.seconds)
            yield self.made[index % _DIFFERENT]


def loader_of(dataset: Any, workers: int, pins: bool) -> Any:
    """Return a loader of complete batches."""
    return DataLoader(dataset, batch_size=None, num_workers=workers, pin_memory=pins)


class Span:
    """Measures the micro-batches after the first ones: every side calls ``step`` at the start of each.

    Args:
        lead: the number of micro-batches that are not measured.
        steps: the number of those that are.
    """

    def __init__(self, device: Device, lead: int, steps: int) -> None:
        self._lead, self._steps, self._count = lead, steps, 0
        self._timer = Timer(device)
        self.seconds = 0.0

    def step(self) -> None:
        """Count a micro-batch."""
        if self._count == self._lead:
            self._timer.start()
        elif self._count == self._lead + self._steps:
            self.seconds = self._timer.stop() / self._steps
        self._count += 1
