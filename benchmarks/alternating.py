"""The cost of logged values per step of phalanx, measured within one fit in which every second step logs.

A difference of a few microseconds drowns in the drift between two fits on a busy machine; neighbours share it.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from phalanx import Trainer

from .table import show
from .task import Batch, Batches, Job, module_class


def price(values: int, steps: int) -> float:
    """Return the median of the steps that log ``values`` values, less that of those that do not, in microseconds."""
    import phalanx

    class Alternating(module_class(phalanx.TrainModule)):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(Job(steps=steps))
            self.began: list[int] = []

        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            self.began.append(time.perf_counter_ns())
            loss = super().training_step(batch, batch_idx)
            if batch_idx % 2:
                for name in names:
                    self.log(name, loss)
            return loss

    names = [f"value{index}" for index in range(values)]
    module = Alternating()
    Trainer(max_epochs=1, barebones=True, accelerator="cpu").fit(module, Batches(steps))
    lengths = [end - begin for begin, end in zip(module.began, module.began[1:], strict=False)]
    return (statistics.median(lengths[1::2]) - statistics.median(lengths[::2])) / 1000


def alternating(rounds: int, quick: bool) -> None:
    """Print the price of 0 (the control), 1, 10 and 100 values a step."""
    steps = 400 if quick else 6000
    rows = []
    for values in (0, 1, 10, 100):
        prices = sorted(price(values, steps) for _ in range(rounds))
        rows.append((f"{values} values", statistics.median(prices), f"{prices[0]:.1f} to {prices[-1]:.1f}"))
    show(
        "Logged values in every second step of a fit, wall µs over its neighbours",
        ("", "phalanx", "least to most"),
        rows,
    )
