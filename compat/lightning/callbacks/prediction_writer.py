"""``lightning.pytorch.callbacks.prediction_writer``."""

from __future__ import annotations

from ....callbacks.prediction_writer import BasePredictionWriter

__all__ = ["BasePredictionWriter"]
