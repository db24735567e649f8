"""Dtypes of parameters and computation: one class for each precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ..framework.core.loss_scaler import LossScaler as LossScaler
    from ..framework.core.precision import Precision as Precision
    from .mixed import BFloat16Mixed as BFloat16Mixed
    from .mixed import Float16Mixed as Float16Mixed
    from .true import BFloat16True as BFloat16True
    from .true import Float16True as Float16True
    from .true import Float32True as Float32True
    from .true import Float64True as Float64True

_HOMES = {
    "BFloat16Mixed": ".mixed",
    "BFloat16True": ".true",
    "Float16Mixed": ".mixed",
    "Float16True": ".true",
    "Float32True": ".true",
    "Float64True": ".true",
    "LossScaler": "..framework.core.loss_scaler",
    "Precision": "..framework.core.precision",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = face(__name__, _HOMES)
