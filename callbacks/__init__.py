"""The callbacks of phalanx, one file each. The module of a callback is imported on first access to its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ..framework.api.callback import Callback as Callback
    from .accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from .early_stopping import EarlyStopping as EarlyStopping
    from .finetuning import BackboneFinetuning as BackboneFinetuning, BaseFinetuning as BaseFinetuning
    from .gradient_norm import GradientNormMonitor as GradientNormMonitor
    from .lambda_callback import LambdaCallback as LambdaCallback
    from .learning_rate import LearningRateMonitor as LearningRateMonitor
    from .model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from .prediction_writer import BasePredictionWriter as BasePredictionWriter, PredictionWriter as PredictionWriter
    from .progress import ProgressBar as ProgressBar, RichProgressBar as RichProgressBar
    from .stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from .summary import ModelSummary as ModelSummary
    from .timer import Timer as Timer
    from .weight_averaging import EMAWeightAveraging as EMAWeightAveraging, WeightAveraging as WeightAveraging

_HOMES = {
    "..framework.api.callback": "Callback",
    ".accumulation": "GradientAccumulationScheduler",
    ".early_stopping": "EarlyStopping",
    ".finetuning": "BackboneFinetuning BaseFinetuning",
    ".gradient_norm": "GradientNormMonitor",
    ".lambda_callback": "LambdaCallback",
    ".learning_rate": "LearningRateMonitor",
    ".model_checkpoint": "ModelCheckpoint",
    ".prediction_writer": "BasePredictionWriter PredictionWriter",
    ".progress": "ProgressBar RichProgressBar",
    ".stochastic_weight_averaging": "StochasticWeightAveraging",
    ".summary": "ModelSummary",
    ".timer": "Timer",
    ".weight_averaging": "EMAWeightAveraging WeightAveraging",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES)
