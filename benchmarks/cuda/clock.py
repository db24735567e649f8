"""Measures a side from within: every side calls ``step`` at the start of each of its steps.

Between two phases the side waits inside that call until the parent lets it continue. So sides take turns on the
device, whatever loop they have, and none of them needs a callback.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from . import trace
from .cells import LEAD, Phase
from .device import Device, Timer

Send = Callable[[Mapping[str, Any]], None]
Measurement = Generator[int, None, dict[str, Any]]
"""Yields the numbers of steps to run; returns the result."""


class Clock:
    """Counts the steps of a fit and measures its phases.

    Args:
        phases: the phases, in order.
        send: sends the result of a phase to the parent.
        wait: returns when the parent wants the next phase.
        folder: for the profiler's trace.
    """

    def __init__(
        self, device: Device, phases: Sequence[Phase], send: Send, wait: Callable[[], object], folder: Path
    ) -> None:
        self._device, self._send, self._wait, self._folder = device, send, wait, folder
        self._left = 0
        self._kept: list[Tensor] | None = None
        self._script = chain.from_iterable(self._phase(phase) for phase in phases)

    def step(self) -> None:
        """Count a step. Called at its start: after the update of the last one, before the forward pass."""
        if self._left:
            self._left -= 1
            return
        # After the last phase, one more step ends it, and none is measured.
        self._left = next(self._script, sys.maxsize) - 1

    def keep(self, loss: Tensor) -> None:
        """Keep the loss of a step, if losses are compared in this phase."""
        if self._kept is not None:
            self._kept.append(loss.detach().clone())

    def _phase(self, phase: Phase) -> Iterator[int]:
        """Yield the numbers of steps to run between two of the points that a phase measures."""
        if phase.kind != "losses":  # the first one, for which the parent has let this process start
            self._wait()
            yield LEAD
        measures: dict[str, Callable[[int], Measurement]] = {
            "losses": self._losses,
            "round": self._round,
            "waits": self._waits,
            "host": self._host,
            "profile": self._profile,
        }
        result = yield from measures[phase.kind](phase.steps)
        self._device.synchronize()
        self._device.free_cache()
        self._send(result)

    def _losses(self, steps: int) -> Measurement:
        kept = self._kept = []
        yield steps
        self._kept = None
        return {"losses": [float(loss) for loss in kept]}

    def _round(self, steps: int) -> Measurement:
        timer = Timer(self._device)
        self._device.forget_peak()
        timer.start()
        yield steps
        return {"seconds": timer.stop() / steps, "peak_bytes": self._device.peak_bytes()}

    def _waits(self, steps: int) -> Measurement:
        if not self._device.reports_waits:
            yield steps
            return {"waits": None}
        with self._device.waits() as found:
            yield steps
        return {"waits": len(found) / steps, "places": sorted(set(found))[:5]}

    def _host(self, steps: int) -> Measurement:
        # The queue of launches is empty at the start of each step, so no launch waits for room in it.
        times = []
        for _ in range(steps):
            self._device.synchronize()
            began = time.perf_counter_ns()
            yield 1
            times.append((time.perf_counter_ns() - began) / 1000)
        return {"host_us": times}

    def _profile(self, steps: int) -> Measurement:
        if not self._device.has_profiler:
            yield steps
            return {"profile": None}
        path = self._folder / "trace.json"
        with self._device.traced(path):
            yield steps
        found = trace.summary(trace.read(path), steps)
        path.unlink()
        return {"profile": found}
