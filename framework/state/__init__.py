"""Canonical state of live modules and optimizers, and weight averages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.lazy_exports import on_call

if TYPE_CHECKING:
    from .hyperparameters import encode_known as encode_known
    from .module_loading import rebuild_module as rebuild_module

__getattr__ = on_call(__name__, {".hyperparameters": "encode_known", ".module_loading": "rebuild_module"})
