"""Pipelines: the repeated blocks of a model divided over ranks, with the schedules of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...framework.core.lazy_exports import on_call

if TYPE_CHECKING:
    from .strategy import PipelineStrategy as PipelineStrategy

__getattr__ = on_call(__name__, {".strategy": "PipelineStrategy"})
