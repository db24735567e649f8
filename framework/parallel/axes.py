"""Axes of a mesh that a strategy does not have, refused with the strategies that have them."""

from __future__ import annotations

from collections.abc import Iterable

from ..core.degrees import Degrees, listed
from ..core.errors import ConfigurationError
from ..core.registry import STRATEGIES


def check_axes(degrees: Degrees, strategy: str, axes: Iterable[str]) -> None:
    """Refuse degrees along axes that a strategy does not have.

    Raises:
        ConfigurationError: there is such a degree; the message names the strategies that have the axis.
    """
    known = tuple(axes)
    for axis in degrees.used:
        if axis not in known:
            takes = f"takes {listed(known)}" if known else "takes no degrees"
            others = [name for name in STRATEGIES if name != strategy and _suits(name, degrees)]
            way = f"use {' or '.join(f'strategy={name!r}' for name in others)}, or leave" if others else "leave"
            raise ConfigurationError(f"{degrees} with strategy={strategy!r}, which {takes}: {way} {axis} out.")


def _suits(name: str, degrees: Degrees) -> bool:
    """Whether a registered strategy has all axes of degrees, and uses no others of its own accord.

    False if it cannot be loaded, or is a function that makes one.
    """
    try:
        strategy = STRATEGIES.load(name)
        return set(strategy.degrees.used) <= set(degrees.used) <= set(strategy.axes)
    except (ImportError, AttributeError):
        return False
