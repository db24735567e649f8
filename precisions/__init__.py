"""Dtypes of parameters and computation: one class for each precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ..framework.core.precision import LossScaler as LossScaler, Precision as Precision
    from .float8 import Float8Mixed as Float8Mixed
    from .mixed import BFloat16Mixed as BFloat16Mixed, Float16Mixed as Float16Mixed
    from .true import (
        BFloat16True as BFloat16True,
        Float16True as Float16True,
        Float32True as Float32True,
        Float64True as Float64True,
    )

_HOMES = {
    "..framework.core.precision": "LossScaler Precision",
    ".float8": "Float8Mixed",
    ".mixed": "BFloat16Mixed Float16Mixed",
    ".true": "BFloat16True Float16True Float32True Float64True",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES)
