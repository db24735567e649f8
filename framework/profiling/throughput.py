"""``Throughput``: the speed of some steps of a fit, over all ranks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..core.size_text import size_text

# The numbers that change from one interval to the next.
_LOGGED = (
    "per_second", "step_seconds", "data_share", "rank_wait_share", "flops_per_second", "mfu", "peak_memory_bytes",
)  # fmt: skip
_SHORT = {"tokens": "tok", "samples": "samples"}
_POWERS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Throughput:
    """The speed of some steps of a fit, over all ranks. Its ``str`` is short, for a line of progress."""

    unit: str
    """``"tokens"`` if the module overrides ``batch_weight``, else ``"samples"``."""
    count: float
    """Units that were trained."""
    per_second: float
    """Units in a second."""
    steps: int
    """Optimizer steps, applied or not."""
    step_seconds: float
    """Seconds of a step on average, with the wait for its data."""
    train_seconds: float
    """Seconds in steps and in waiting for data: without validation, the ends of epochs, and set-up."""
    data_share: float
    """The share of these seconds in which the ranks waited for data."""
    rank_wait_share: float | None
    """The share in which the processes of the ranks waited for other ranks; None on a single rank.

    Measured at the control reduction of each step. The time of collectives that a device executes by itself, such as
    the reduction of gradients over NCCL, is not part of it.
    """
    flops_per_second: float | None
    """Model FLOPs of all ranks together; None if they were not counted."""
    flops_per_unit: float | None
    """Model FLOPs of a unit in its forward and backward pass, each counted once: without recomputed activations."""
    device_peak_flops: float | None
    """FLOPs that one device can compute in a second in the dtype of the run's matrix products; None if unknown."""
    mfu: float | None
    """Model FLOPs utilization: ``flops_per_second`` over the peak of all devices."""
    peak_memory_bytes: int | None
    """The most memory that this rank has used so far: on its device, else of its process."""

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers as JSON values."""
        return asdict(self)

    def logged(self) -> dict[str, float]:
        """Return the numbers for loggers, those that are known, under the prefix ``throughput/``."""
        values = {name: getattr(self, name) for name in _LOGGED}
        return {f"throughput/{name}": float(value) for name, value in values.items() if value is not None}

    def __str__(self) -> str:
        parts = [f"{_short(self.per_second)} {_SHORT[self.unit]}/s"]
        if self.mfu is not None:
            parts.append(f"MFU {_percent(self.mfu)}")
        parts.append(f"data {_percent(self.data_share)}")
        if self.peak_memory_bytes is not None:
            parts.append(size_text(self.peak_memory_bytes))
        return ", ".join(parts)


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.0095 else 1}f} %"


def _short(number: float) -> str:
    """Return a number with three significant digits: ``41.2k``."""
    for size, letter in _POWERS:
        if number >= 0.9995 * size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
