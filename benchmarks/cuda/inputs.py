"""The process that measures data: copies to the device, and accumulation with a loader that takes time."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..sides import missing, run
from ..task import Batch, Job
from .child import Parent
from .device import Device
from .fits import Marks

_PIN, _WINDOW, _DIFFERENT, _SHARED_BYTES = "PHALANX_PIN_MEMORY", 8, 4, 2e9


class Network(nn.Module):
    """Patches, residual perceptrons on each of them, and their mean: about as long as copying the images takes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss for images [rows, 3, side, side], uint8; all have the label 0."""
        x = self.patches(batch[0].float() / 255).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = x + layer(x)
        loss: Tensor = -self.head(x.mean(1)).float().log_softmax(-1)[:, 0].mean()
        return loss


class Images(Dataset[Batch]):
    """Batches of images that exist already, each of which takes some seconds to load."""

    def __init__(self, made: list[Tensor], count: int, seconds: float = 0.0) -> None:
        self._made, self._count, self._seconds = made, count, seconds

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Batch:
        """Return a batch; a worker copies it into shared memory."""
        if index >= self._count:
            raise IndexError(index)
        if self._seconds:
            time.sleep(self._seconds)
        return (self._made[index % _DIFFERENT],)


@dataclass
class Case:
    """One way to feed a network; ``seconds`` are those of a micro-batch, one value for each round."""

    group: str
    title: str
    side: str
    batches: Callable[[int], Any]
    window: int = 1
    variables: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    problem: str = ""

    def measure(self, device: Device, network: Callable[[], nn.Module], steps: int) -> None:
        """Add a round, or the reason why it failed."""
        os.environ.update(self.variables)
        actions = {_WINDOW: device.start, _WINDOW + steps: lambda: self.seconds.append(device.stop() / steps)}
        # One more window ends the last one that is measured.
        job = Job(
            2 * _WINDOW + steps,
            network=network,
            batches=self.batches,
            accumulate=self.window,
            device=device.kind,
            precision="bf16-mixed",
            mark=Marks(actions),
        )
        try:
            run(self.side, job)
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            for name in self.variables:
                os.environ.pop(name, None)


def cases(made: list[Tensor], device: Device, workers: int, delay: float) -> Iterator[Case]:
    """Yield the cases of copies, then those of accumulation with a loader that takes ``delay`` seconds."""
    ready, resident = ([each.to(place) for each in made] for place in ("cpu", device.torch))
    ready = [each.pin_memory() for each in ready] if device.is_cuda else ready

    def on_device(count: int) -> Any:
        return [(resident[index % _DIFFERENT],) for index in range(count)]

    def loader(pins: bool, count: int) -> Any:
        # Complete batches, as a batch size of None says.
        pins = pins and device.is_cuda
        return DataLoader(Images(made, count), batch_size=None, num_workers=workers, pin_memory=pins)

    def slow(count: int) -> Any:
        return DataLoader(Images(ready, count, delay), batch_size=None)

    copies, pinned, pageable = "copies", partial(loader, True), partial(loader, False)
    yield Case(copies, "raw, batches on the device", "raw", on_device)
    yield Case(copies, "raw, pageable", "raw", pageable)
    yield Case(copies, "raw, pinned", "raw", pinned)
    yield Case(copies, "phalanx", "phalanx", pageable, variables={_PIN: "1"})
    yield Case(copies, f"phalanx, {_PIN}=0", "phalanx", pageable, variables={_PIN: "0"})
    yield Case(copies, "Lightning, pinned", "Lightning", pinned)
    for window in (1, _WINDOW):
        for side in ("raw", "phalanx", "Lightning"):
            yield Case("slow loader", f"{side}, accumulation of {window}", side, slow, window)


def main() -> None:
    parent, given = Parent(), json.loads(sys.argv[1])
    device, tiny = Device(given["device"]), bool(given["tiny"])
    # Workers hand batches over in shared memory, which containers often limit.
    workers = 4 if not tiny and shutil.disk_usage("/dev/shm").free > _SHARED_BYTES else 0
    shape, network = (
        ((4, 3, 32, 32), partial(Network, 16, 2)) if tiny else ((256, 3, 224, 224), partial(Network, 384, 8))
    )
    made = [torch.randint(256, shape, dtype=torch.uint8) for _ in range(_DIFFERENT)]
    steps, rounds = (_WINDOW, 1) if tiny or given["quick"] else (3 * _WINDOW, 3)
    # A batch takes as long to load as to compute, so that a loop that does not overlap both takes twice as long.
    first = next(cases(made, device, workers, 0.0))
    for _ in range(2):
        first.measure(device, network, steps)
    delay = min(first.seconds, default=0.01)
    measured = [case for case in cases(made, device, workers, delay) if not missing(case.side)]
    for _ in range(rounds):
        for case in measured:
            if not case.problem:
                case.measure(device, network, steps)
                found = {name: getattr(case, name) for name in ("group", "title", "seconds", "problem")}
                parent.send(found | {"workers": workers, "delay": delay})


if __name__ == "__main__":
    main()
