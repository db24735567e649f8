"""``LossScaler``: dynamic loss scaling, so that small gradients survive in fp16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018, "Mixed Precision Training").

    The loss is multiplied by ``scale`` before backward, and gradients are divided by it before they are clipped or
    applied. An update whose gradients are not finite is skipped and the scale halved; after ``growth_interval`` good
    updates in a row it doubles.

    The scale is a Python number, not a tensor on the device: it is part of the factor that each loss is multiplied by
    anyway, and whether an update was good must reach the host in any case, since counters and schedulers depend on it.
    """

    def __init__(
        self,
        scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        self.scale = scale
        self.growth_factor = growth_factor
        self.backoff_factor = backoff_factor
        self.growth_interval = growth_interval
        self._good_updates = 0

    def unscale_(self, gradients: list[Tensor]) -> None:
        """Divide gradients by the scale, in place."""
        if gradients:
            torch._foreach_mul_(gradients, 1.0 / self.scale)

    def update(self, finite: bool) -> None:
        """Adapt the scale after an update; ``finite``: whether its gradients were finite on all ranks."""
        if not finite:
            self.scale *= self.backoff_factor
            self._good_updates = 0
            return
        self._good_updates += 1
        if self._good_updates == self.growth_interval:
            self.scale *= self.growth_factor
            self._good_updates = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the number of good updates in a row."""
        return {"scale": self.scale, "good_updates": self._good_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by ``state_dict``."""
        self.scale = float(state["scale"])
        self._good_updates = int(state["good_updates"])
