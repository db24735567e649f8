"""Strategies, which distribute work and state over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ..framework.parallel.step_flags import StepFlags as StepFlags
    from ..framework.parallel.strategy import (
        StepAdapter as StepAdapter,
        StepFunction as StepFunction,
        Strategy as Strategy,
        Traits as Traits,
    )
    from .ddp import DDPStrategy as DDPStrategy
    from .deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy
    from .fsdp.strategy import FSDPStrategy as FSDPStrategy, hsdp as hsdp
    from .single import SingleDeviceStrategy as SingleDeviceStrategy

_HOMES = {
    "..framework.parallel.step_flags": "StepFlags",
    "..framework.parallel.strategy": "StepAdapter StepFunction Strategy Traits",
    ".ddp": "DDPStrategy",
    ".deepspeed.strategy": "DeepSpeedStrategy",
    ".fsdp.strategy": "FSDPStrategy hsdp",
    ".single": "SingleDeviceStrategy",
}

__all__, __getattr__, __dir__ = face(__name__, _HOMES)
