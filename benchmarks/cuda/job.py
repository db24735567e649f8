"""The arguments of a side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .cells import Size
from .clock import Clock
from .model import Batches


@dataclass(frozen=True)
class Job:
    """One fit: what a side has to train, how, and the clock that measures it."""

    size: Size
    strategy: str
    options: Mapping[str, Any]
    """Settings of the strategy."""
    compiled: bool
    device: torch.device
    clock: Clock
    batches: Batches
    folder: Path
    """For temporary files."""
