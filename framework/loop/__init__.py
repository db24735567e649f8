"""The training loop, the evaluation loop, and one optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .batch_norm_statistics import statistics_pass as statistics_pass
    from .evaluation_loop import evaluate as evaluate, predict as predict
    from .manual_step import ManualStep as ManualStep
    from .profiled_fit import profiled as profiled

_HOMES = {
    ".batch_norm_statistics": "statistics_pass",
    ".evaluation_loop": "evaluate predict",
    ".manual_step": "ManualStep",
    ".profiled_fit": "profiled",
}

__getattr__ = on_call(__name__, _HOMES)
