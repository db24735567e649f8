"""Variants of ``fsdp`` with names of their own: ``hsdp`` and ``fsdp-offload``."""

from __future__ import annotations

from typing import Any

from .mesh import Replicas
from .strategy import FSDPStrategy
from .units import Units


def hsdp(units: Units = None, *, replicas: Replicas = "node", **arguments: Any) -> FSDPStrategy:
    """Return ``fsdp`` with full replicas of the model: one per node, and two on a single node."""
    strategy = FSDPStrategy(units, replicas=replicas, **arguments)
    strategy.name = "hsdp"
    return strategy


def fsdp_offload(units: Units = None, **arguments: Any) -> FSDPStrategy:
    """Return ``fsdp`` with shards, gradients and optimizer state in the CPU's memory."""
    strategy = FSDPStrategy(units, cpu_offload=True, **arguments)
    strategy.name = "fsdp-offload"
    return strategy
