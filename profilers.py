"""``phalanx.profilers``: the profilers of a fit, for ``Trainer(profiler=...)``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .framework.core.lazy_exports import face

if TYPE_CHECKING:
    from .framework.profiling.advanced_profiler import AdvancedProfiler as AdvancedProfiler
    from .framework.profiling.profiler import PassThroughProfiler as PassThroughProfiler, Profiler as Profiler
    from .framework.profiling.simple_profiler import SimpleProfiler as SimpleProfiler
    from .framework.profiling.torch_profiler import PyTorchProfiler as PyTorchProfiler

_HOMES = {
    ".framework.profiling.advanced_profiler": "AdvancedProfiler",
    ".framework.profiling.profiler": "PassThroughProfiler Profiler",
    ".framework.profiling.simple_profiler": "SimpleProfiler",
    ".framework.profiling.torch_profiler": "PyTorchProfiler",
}

# Names of Lightning that have no counterpart here.
_ABSENT = {"XLAProfiler": "phalanx does not train on TPUs; PyTorchProfiler traces CPUs and GPUs."}

__all__, __getattr__, __dir__ = face(__name__, _HOMES, _ABSENT)
