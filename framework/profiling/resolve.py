"""The profiler that a user has chosen by name or passed as an object."""

from __future__ import annotations

from typing import Any

from ..core.errors import ConfigurationError, unknown
from .advanced_profiler import AdvancedProfiler
from .profiler import PassThroughProfiler, Profiler
from .simple_profiler import SimpleProfiler
from .torch_profiler import PyTorchProfiler

_KNOWN: dict[str, type[Profiler]] = {
    "simple": SimpleProfiler,
    "advanced": AdvancedProfiler,
    "torch": PyTorchProfiler,
    "pytorch": PyTorchProfiler,
}


def resolve_profiler(name: str, given: Any) -> Profiler:
    """Return the profiler for a name, an object, or None: the rule of ``Trainer(profiler=...)``.

    Raises:
        UnknownNameError: the name is not known.
        ConfigurationError: it is another object.
    """
    if given is None:
        return PassThroughProfiler()
    if isinstance(given, str):
        if given not in _KNOWN:
            raise unknown(name, given, list(_KNOWN))
        return _KNOWN[given]()
    if not isinstance(given, Profiler):
        hint = f" Pass an instance: {given.__name__}()." if isinstance(given, type) else ""
        raise ConfigurationError(f"{name}={given!r} must be None, one of {', '.join(_KNOWN)}, or a Profiler.{hint}")
    return given
