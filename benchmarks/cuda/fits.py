"""The process of one side: runs a fit for each command of the parent, and answers with what it has measured."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..sides import run
from ..task import Job
from .child import Parent
from .device import Device, read, summary

LEAD, CHECKED, WATCHED, TRACED = 2, 6, 5, 3
"""Numbers of steps: before each measurement, compared with the raw loop, watched for waits, and traced."""


class Marks:
    """Calls functions at the start of given steps, the first of which is 0."""

    def __init__(self, actions: Mapping[int, Callable[[], object]]) -> None:
        self._actions, self._count = actions, 0

    def __call__(self) -> None:
        if self._count in self._actions:
            self._actions[self._count]()
        self._count += 1


class Fits:
    """The fits of one side. The device's memory is free between them."""

    def __init__(self, side: str, job: Job, device: Device, folder: Path) -> None:
        self._side, self._job, self._device, self._folder = side, job, device, folder

    def fit(self, steps: int, actions: Mapping[int, Callable[[], object]], **changes: Any) -> None:
        """Run a fit."""
        if self._job.compiled:
            # The number of compiled versions of a function is limited, and each fit adds one.
            torch._dynamo.reset()
        run(self._side, replace(self._job, steps=steps, mark=Marks(actions), **changes))
        gc.collect()
        self._device.synchronize()
        self._device.free_cache()

    def check(self, steps: int) -> dict[str, Any]:
        """Return the losses of the first steps on one batch."""
        kept: list[Tensor] = []
        self.fit(CHECKED, {}, keep=lambda loss: kept.append(loss.detach().clone()), different=1)
        return {"losses": [float(loss) for loss in kept]}

    def round(self, steps: int) -> dict[str, Any]:
        """Return the seconds of a step and the peak of memory."""
        found: dict[str, Any] = {}

        def stop() -> None:
            found.update(seconds=self._device.stop() / steps, peak_bytes=self._device.peak_bytes())

        self.fit(LEAD + steps + 1, {LEAD: self._device.start, LEAD + steps: stop})
        return found

    def probe(self, steps: int) -> dict[str, Any]:
        """Return the waits of the host, and the summary of a trace.

        It comes last, as the library of the profiler slows launches down for the rest of the process.
        """
        path, stack, waits = self._folder / "trace.json", ExitStack(), list[list[str]]()

        def trace() -> None:
            stack.close()
            stack.enter_context(self._device.traced(path))

        actions: dict[int, Callable[[], object]] = {
            LEAD: lambda: waits.append(stack.enter_context(self._device.waits())),
            LEAD + WATCHED: trace,
            LEAD + WATCHED + TRACED: stack.close,
        }
        self.fit(LEAD + WATCHED + TRACED + 1, actions)
        found = {"waits": len(waits[0]) / WATCHED, "places": sorted(set(waits[0]))[:5], "profile": None}
        if path.exists():
            found["profile"] = summary(read(path), TRACED)
            path.unlink()
        return found if self._device.is_cuda else {}


def main() -> None:
    parent, given = Parent(), json.loads(sys.argv[1])
    device, folder = Device(given["device"]), Path(given["folder"])
    job = Job(1, device=device.kind, precision="bf16-mixed", **given["job"])
    fits = Fits(given["side"], job, device, folder)
    parent.send({})
    for command in parent.commands():
        what, _, steps = command.partition(" ")
        parent.send(getattr(fits, what)(int(steps)))


if __name__ == "__main__":
    main()
