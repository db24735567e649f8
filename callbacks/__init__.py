"""The callbacks of phalanx. The module of a callback is imported on first access to its name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ..framework.api.callback import Callback as Callback
    from .accumulation import GradientAccumulationScheduler as GradientAccumulationScheduler
    from .device_stats import DeviceStatsMonitor as DeviceStatsMonitor
    from .early_stopping import EarlyStopping as EarlyStopping
    from .evaluate import Evaluate as Evaluate
    from .finetuning import BackboneFinetuning as BackboneFinetuning, BaseFinetuning as BaseFinetuning
    from .gradient_norm import GradientNormMonitor as GradientNormMonitor
    from .lambda_callback import LambdaCallback as LambdaCallback
    from .learning_rate import LearningRateMonitor as LearningRateMonitor
    from .model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from .on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from .optuna_pruning import OptunaPruning as OptunaPruning
    from .prediction_writer import BasePredictionWriter as BasePredictionWriter, PredictionWriter as PredictionWriter
    from .progress import (
        ProgressBar as ProgressBar,
        RichProgressBar as RichProgressBar,
        TQDMProgressBar as TQDMProgressBar,
    )
    from .stochastic_weight_averaging import StochasticWeightAveraging as StochasticWeightAveraging
    from .summary import ModelSummary as ModelSummary, RichModelSummary as RichModelSummary
    from .throughput import ThroughputMonitor as ThroughputMonitor
    from .timer import Timer as Timer
    from .weight_averaging import EMAWeightAveraging as EMAWeightAveraging, WeightAveraging as WeightAveraging

_HOMES = {
    "..framework.api.callback": "Callback",
    ".accumulation": "GradientAccumulationScheduler",
    ".device_stats": "DeviceStatsMonitor",
    ".early_stopping": "EarlyStopping",
    ".evaluate": "Evaluate",
    ".finetuning": "BackboneFinetuning BaseFinetuning",
    ".gradient_norm": "GradientNormMonitor",
    ".lambda_callback": "LambdaCallback",
    ".learning_rate": "LearningRateMonitor",
    ".model_checkpoint": "ModelCheckpoint",
    ".on_exception_checkpoint": "OnExceptionCheckpoint",
    ".optuna_pruning": "OptunaPruning",
    ".prediction_writer": "BasePredictionWriter PredictionWriter",
    ".progress": "ProgressBar RichProgressBar TQDMProgressBar",
    ".stochastic_weight_averaging": "StochasticWeightAveraging",
    ".summary": "ModelSummary RichModelSummary",
    ".throughput": "ThroughputMonitor",
    ".timer": "Timer",
    ".weight_averaging": "EMAWeightAveraging WeightAveraging",
}

# Names of Lightning that have no counterpart here.
_ABSENT = {
    "BatchSizeFinder": "call trainer.find_batch_size(module, loader) before fit, or pass global_batch_size=... and "
    "micro_batch_size='auto' to the Trainer: the fit finds the size.",
    "Checkpoint": "derive a callback that saves from ModelCheckpoint, or from Callback with runs_last = True.",
    "LearningRateFinder": "call trainer.find_lr(module, loader) before fit, and use the rate of its suggestion().",
    "ModelPruning": "a pruned parameter has another name, which no checkpoint and no sharded strategy expects; call "
    "torch.nn.utils.prune on the module after the fit, and prune.remove before its weights are saved.",
    "SpikeDetection": "every fit reports loss spikes, with their value, rank and step.",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES, _ABSENT)
