"""What watches a run and acts on it: one file each. A callback's module loads when its name is first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..framework.callback import Callback as Callback
    from .accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from .early_stopping import EarlyStopping as EarlyStopping
    from .gradient_norm import GradientNormMonitor as GradientNormMonitor
    from .lambda_callback import LambdaCallback as LambdaCallback
    from .learning_rate import LearningRateMonitor as LearningRateMonitor
    from .model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from .progress import ProgressBar as ProgressBar
    from .progress import RichProgressBar as RichProgressBar
    from .summary import ModelSummary as ModelSummary
    from .timer import Timer as Timer

_HOMES = {
    "Callback": "..framework.callback",
    "EarlyStopping": ".early_stopping",
    "GradientAccumulationScheduler": ".accumulation",
    "GradientNormMonitor": ".gradient_norm",
    "LambdaCallback": ".lambda_callback",
    "LearningRateMonitor": ".learning_rate",
    "ModelCheckpoint": ".model_checkpoint",
    "ModelSummary": ".summary",
    "ProgressBar": ".progress",
    "RichProgressBar": ".progress",
    "Timer": ".timer",
}

__all__ = [
    "Callback",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "GradientNormMonitor",
    "LambdaCallback",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelSummary",
    "ProgressBar",
    "RichProgressBar",
    "Timer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
