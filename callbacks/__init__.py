"""The callbacks of phalanx, one file each. The module of a callback is imported on first access to its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ..framework.api.callback import Callback as Callback
    from .accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from .early_stopping import EarlyStopping as EarlyStopping
    from .gradient_norm import GradientNormMonitor as GradientNormMonitor
    from .lambda_callback import LambdaCallback as LambdaCallback
    from .learning_rate import LearningRateMonitor as LearningRateMonitor
    from .model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from .progress import ProgressBar as ProgressBar
    from .progress import RichProgressBar as RichProgressBar
    from .stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from .summary import ModelSummary as ModelSummary
    from .timer import Timer as Timer
    from .weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from .weight_averaging import WeightAveraging as WeightAveraging

_HOMES = {
    "Callback": "..framework.api.callback",
    "EMAWeightAveraging": ".weight_averaging",
    "EarlyStopping": ".early_stopping",
    "GradientAccumulationScheduler": ".accumulation",
    "GradientNormMonitor": ".gradient_norm",
    "LambdaCallback": ".lambda_callback",
    "LearningRateMonitor": ".learning_rate",
    "ModelCheckpoint": ".model_checkpoint",
    "ModelSummary": ".summary",
    "ProgressBar": ".progress",
    "RichProgressBar": ".progress",
    "StochasticWeightAveraging": ".stochastic_weight_averaging",
    "Timer": ".timer",
    "WeightAveraging": ".weight_averaging",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = face(__name__, _HOMES)
