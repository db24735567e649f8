"""The numbers that ``ProgressBar`` displays, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..framework.api.contracts import TrainerView


def as_text(metrics: Mapping[str, Any]) -> list[str]:
    """Return metrics as text. On a GPU, reading them waits for the device."""
    return [
        f"{name} {value}" if isinstance(value, str) else f"{name} {float(value):.4g}" for name, value in metrics.items()
    ]


def learning_rate(trainer: TrainerView) -> list[str]:
    """Return the learning rate of the first optimizer's newest update, unless reading it would wait for a device."""
    optimizers: Sequence[Any] = trainer.optimizers
    used = trainer.run.used_rates if trainer.run is not None else ()
    rate = used[0] if used else optimizers[0].param_groups[0].get("lr") if optimizers else None
    return [f"lr {rate:.3g}"] if isinstance(rate, float) and rate == rate else []


def speed(rate: float) -> str:
    """Return a number of batches in a second."""
    return f"{rate:,.0f} it/s" if rate >= 999.5 else f"{rate:.3g} it/s"
