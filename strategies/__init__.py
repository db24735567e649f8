"""Strategies, which distribute work and state over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..framework.core.lazy_exports import face

if TYPE_CHECKING:
    from ..framework.parallel.canonical_state import CanonicalState as CanonicalState
    from ..framework.parallel.gradient_operations import GradientOperations as GradientOperations
    from ..framework.parallel.step_flags import StepFlags as StepFlags
    from ..framework.parallel.strategy import Routed as Routed
    from ..framework.parallel.strategy import StepAdapter as StepAdapter
    from ..framework.parallel.strategy import StepFunction as StepFunction
    from ..framework.parallel.strategy import Strategy as Strategy
    from ..framework.parallel.strategy import Traits as Traits
    from .ddp import DDPStrategy as DDPStrategy
    from .deepspeed.strategy import DeepSpeedStrategy as DeepSpeedStrategy
    from .fsdp.strategy import FSDPStrategy as FSDPStrategy
    from .fsdp.strategy import hsdp as hsdp
    from .single import SingleDeviceStrategy as SingleDeviceStrategy

_HOMES = {
    "CanonicalState": "..framework.parallel.canonical_state",
    "DDPStrategy": ".ddp",
    "DeepSpeedStrategy": ".deepspeed.strategy",
    "FSDPStrategy": ".fsdp.strategy",
    "GradientOperations": "..framework.parallel.gradient_operations",
    "Routed": "..framework.parallel.strategy",
    "SingleDeviceStrategy": ".single",
    "StepAdapter": "..framework.parallel.strategy",
    "StepFlags": "..framework.parallel.step_flags",
    "StepFunction": "..framework.parallel.strategy",
    "Strategy": "..framework.parallel.strategy",
    "Traits": "..framework.parallel.strategy",
    "hsdp": ".fsdp.strategy",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = face(__name__, _HOMES)
