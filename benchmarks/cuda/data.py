"""The process that measures data: copies to the device, and accumulation with a loader that takes time."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from .channel import Parent
from .data_task import IMAGES, TINY_IMAGES, Images, Network, Prepared, Slow, Span, loader_of
from .device import Device

_PIN = "PHALANX_PIN_MEMORY"
_WINDOW = 8
_SHARED_BYTES = 2e9


@dataclass
class Case:
    """One way to feed a network; ``seconds`` are those of a micro-batch, one value for each round."""

    group: str
    title: str
    fit: Callable[[Span, int], None]
    variables: dict[str, str] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    problem: str = ""


class Feeding:
    """The fits of all cases on a device."""

    def __init__(self, device: Device, images: Images, workers: int) -> None:
        self._device, self._images, self._workers = device, images, workers

    def cases(self, delay: float) -> Iterator[Case]:
        """Yield the cases of copies, then those of accumulation with a loader that takes ``delay`` seconds."""
        pinned, pageable = partial(self._loader, True), partial(self._loader, False)
        copies = "copies"
        yield Case(copies, "raw, batches on the device", partial(self.raw, self._resident, 1))
        yield Case(copies, "raw, pageable", partial(self.raw, pageable, 1))
        yield Case(copies, "raw, pinned", partial(self.raw, pinned, 1))
        yield Case(copies, "phalanx", partial(self.trainer, "phalanx", pageable, 1), {_PIN: "1"})
        yield Case(copies, f"phalanx, {_PIN}=0", partial(self.trainer, "phalanx", pageable, 1), {_PIN: "0"})
        if find_spec("lightning"):
            yield Case(copies, "lightning, pinned", partial(self.trainer, "lightning", pinned, 1))
        for window in (1, _WINDOW):
            slow = partial(self._slow, delay)
            title, group = f"accumulation of {window}", "slow loader"
            yield Case(group, f"raw, {title}", partial(self.raw, slow, window))
            yield Case(group, f"phalanx, {title}", partial(self.trainer, "phalanx", slow, window))
            if find_spec("lightning"):
                yield Case(group, f"lightning, {title}", partial(self.trainer, "lightning", slow, window))

    def _resident(self, count: int) -> Any:
        made = [batch.to(self._device.torch) for batch in Prepared(self._images, count).made]
        return [made[index % len(made)] for index in range(count)]

    def _loader(self, pins: bool, count: int) -> Any:
        return loader_of(Prepared(self._images, count), self._workers, pins and self._device.is_cuda)

    def _slow(self, delay: float, count: int) -> Any:
        return loader_of(Slow(self._images, count, delay, self._device.is_cuda), 0, False)

    def raw(self, loader: Callable[[int], Any], window: int, span: Span, count: int) -> None:
        """Run the loop in plain torch."""
        device = self._device.torch
        network = Network(self._images).to(device)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=True)
        for index, batch in enumerate(loader(count)):
            span.step()
            batch = batch.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = network(batch)
            (loss / window).backward()
            if (index + 1) % window == 0:
                optimizer.step()
                optimizer.zero_grad()

    def trainer(self, library: str, loader: Callable[[int], Any], window: int, span: Span, count: int) -> None:
        """Run the fit of a Trainer."""
        source: Any = import_module("phalanx" if library == "phalanx" else "lightning.pytorch")
        base: Any = source.TrainModule if library == "phalanx" else source.LightningModule
        own = {"stall_timeout": False} if library == "phalanx" else {}
        images = self._images

        class Task(base):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.network = Network(images)

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                span.step()
                loss: Tensor = self.network(batch)
                return loss

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)

        with tempfile.TemporaryDirectory(prefix="bench-") as directory:
            trainer = source.Trainer(
                accelerator=self._device.kind,
                devices=1,
                precision="bf16-mixed",
                max_epochs=1,
                accumulate_grad_batches=window,
                barebones=True,
                default_root_dir=directory,
                **own,
            )
            trainer.fit(Task(), loader(count))


def measure(case: Case, device: Device, steps: int) -> None:
    """Add a round to a case, or the reason why it failed."""
    os.environ.update(case.variables)
    span = Span(device, _WINDOW, steps)
    try:
        # One more window ends the last one that is measured.
        case.fit(span, 2 * _WINDOW + steps)
        case.seconds.append(span.seconds)
    except Exception as error:
        case.problem = f"{type(error).__name__}: {error}"
    finally:
        for name in case.variables:
            os.environ.pop(name, None)


def main() -> None:
    parent = Parent()
    given = json.loads(sys.argv[1])
    device = Device(given["device"])
    tiny: bool = given["tiny"]
    # Workers hand batches over in shared memory, which containers often limit.
    workers = 4 if not tiny and shutil.disk_usage("/dev/shm").free > _SHARED_BYTES else 0
    feeding = Feeding(device, TINY_IMAGES if tiny else IMAGES, workers)
    steps, rounds = (_WINDOW, 1) if tiny or given["quick"] else (3 * _WINDOW, 3)
    # A batch takes as long to load as to compute, so that a loop that does not overlap both takes twice as long.
    resident = next(feeding.cases(0.0))
    for _ in range(2):
        measure(resident, device, steps)
    delay = min(resident.seconds, default=0.01)
    cases = list(feeding.cases(delay))
    for _ in range(rounds):
        for case in cases:
            if not case.problem:
                measure(case, device, steps)
                found = {name: getattr(case, name) for name in ("group", "title", "seconds", "problem")}
                parent.send({"data": found | {"workers": workers, "delay": delay}})


if __name__ == "__main__":
    main()
