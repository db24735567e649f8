"""Strategies, which distribute work and state over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ..framework.parallel.canonical_state import CanonicalState as CanonicalState
    from ..framework.parallel.gradient_operations import GradientOperations as GradientOperations
    from ..framework.parallel.step_flags import StepFlags as StepFlags
    from ..framework.parallel.strategy import (
        MemoryLayout as MemoryLayout,
        Routed as Routed,
        StepAdapter as StepAdapter,
        StepFunction as StepFunction,
        Strategy as Strategy,
        Traits as Traits,
    )
    from .ddp import DDPStrategy as DDPStrategy
    from .deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy
    from .fsdp.strategy import FSDPStrategy as FSDPStrategy, hsdp as hsdp
    from .pipeline.strategy import PipelineStrategy as PipelineStrategy
    from .single import SingleDeviceStrategy as SingleDeviceStrategy

_HOMES = {
    "..framework.parallel.canonical_state": "CanonicalState",
    "..framework.parallel.gradient_operations": "GradientOperations",
    "..framework.parallel.step_flags": "StepFlags",
    "..framework.parallel.strategy": "MemoryLayout Routed StepAdapter StepFunction Strategy Traits",
    ".ddp": "DDPStrategy",
    ".deepspeed.strategy": "DeepSpeedStrategy",
    ".fsdp.strategy": "FSDPStrategy hsdp",
    ".pipeline.strategy": "PipelineStrategy",
    ".single": "SingleDeviceStrategy",
}

# Strategies of Lightning that have no counterpart here.
_ABSENT = {
    "ModelParallelStrategy": "use FSDPStrategy(tensor_parallel=...), and configure_tensor_parallel in the module.",
    "ParallelStrategy": "compare trainer.world_size with 1 to ask for several ranks, or derive from Strategy, of which "
    "docs/extending.md shows a complete one.",
    "XLAStrategy": "phalanx trains on CPUs and CUDA GPUs.",
    "SingleDeviceXLAStrategy": "phalanx trains on CPUs and CUDA GPUs.",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES, _ABSENT)
