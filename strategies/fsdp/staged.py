"""``fsdp`` with stages: a pipeline whose stages are sharded."""

from __future__ import annotations

from inspect import signature
from typing import Any

from ...framework.core.degrees import Degrees
from ...framework.core.errors import ConfigurationError
from ...framework.parallel.strategy import Strategy
from ..pipeline import PipelineStrategy


def sharded_stages(strategy: Any, degrees: Degrees) -> Strategy:
    """Return a pipeline for degrees with ``pp``; the ranks that they leave share the state of stages.

    Args:
        strategy: an ``FSDPStrategy``, whose arguments other than degrees must be the defaults.
        degrees: the degrees of ``parallel=`` and of its arguments.

    Raises:
        ConfigurationError: there are other arguments.
    """
    own = signature(type(strategy)).parameters
    given = [name for name, each in own.items() if getattr(strategy, name, each.default) != each.default]
    if others := [name for name in given if degrees.dp_replicate is None or name != "replicas"]:
        raise ConfigurationError(
            f"{degrees} with FSDPStrategy({', '.join(f'{name}=...' for name in others)}): stages of a pipeline are "
            "sharded by block, without these arguments. Leave them out, or leave pp out."
        )
    if -1 not in degrees.given.values() and degrees.dp_shard is None:
        degrees = Degrees(**{**degrees.given, "dp_shard": -1})
    return PipelineStrategy().with_degrees(degrees)
