"""``PartialState``: the place of this process before anything is set up."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ...framework.fabric.fabric import Fabric
from .arguments import default_devices


class PartialState:
    """The rank of this process, and the verbs that need no module."""

    def __init__(self, cpu: bool = False, **options: Any) -> None:
        self._fabric = Fabric(accelerator="cpu" if cpu else "auto", devices=default_devices())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fabric, name)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._fabric.device

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Give each rank its part of a list, a tuple, a dict or a tensor."""
        return self._fabric.split_between_processes(inputs, apply_padding)
