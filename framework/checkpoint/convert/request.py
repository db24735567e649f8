"""The arguments of a conversion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from .unpickle_client import Content, Job

Reader = Callable[[Sequence[Job]], list[Content]]
"""Reads foreign files in a process of its own."""


@dataclass(frozen=True)
class Request:
    """The source, and the user's objects that tell names."""

    source: Path
    read: Reader
    module: Any = None
    optimizers: Sequence[Optimizer] | None = None
    prefix: str = ""
