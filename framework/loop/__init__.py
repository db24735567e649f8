"""The training loop, the evaluation loop, and one optimizer step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .batch_norm_statistics import statistics_pass as statistics_pass
    from .evaluation_loop import evaluate as evaluate
    from .evaluation_loop import predict as predict
    from .manual_step import ManualStep as ManualStep

_HOMES = {
    "ManualStep": ".manual_step",
    "evaluate": ".evaluation_loop",
    "predict": ".evaluation_loop",
    "statistics_pass": ".batch_norm_statistics",
}

__getattr__ = on_call(__name__, _HOMES)
