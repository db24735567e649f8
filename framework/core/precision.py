"""Precision as data: which dtype parameters are stored in, computed in and reduced in, plus the loss scaler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigurationError, unknown


@dataclass(frozen=True)
class Precision:
    """What a precision name stands for. ``scaled`` says that losses are scaled so that small gradients survive."""

    name: str
    storage: torch.dtype
    compute: torch.dtype
    reduction: torch.dtype
    scaled: bool = False

    @property
    def autocasts(self) -> bool:
        """Whether operations choose their dtype themselves, parameters staying as they are stored."""
        return self.compute != self.storage

    @property
    def converts_inputs(self) -> bool:
        """Whether floating-point inputs are cast to the storage dtype before a step."""
        return self.storage != torch.float32

    def context(self, device_type: str) -> AbstractContextManager[Any] | None:
        """Return the re-enterable context that a step runs in, or None where it needs none."""
        if self.autocasts:
            return torch.autocast(device_type, dtype=self.compute)
        return DefaultDtype(self.storage) if self.storage != torch.float32 else None

    def convert_inputs(self, batch: Any) -> Any:
        """Return ``batch`` with its floating-point tensors in the storage dtype."""
        from lightning_utilities.core.apply_func import apply_to_collection

        return apply_to_collection(batch, Tensor, self._convert)

    def _convert(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.storage) if tensor.is_floating_point() else tensor


class DefaultDtype:
    """Context in which new floating-point tensors have the given dtype. May be entered again, not nested in itself."""

    __slots__ = ("_dtype", "_previous")

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._previous = torch.float32

    def __enter__(self) -> None:
        self._previous = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *exception: object) -> None:
        torch.set_default_dtype(self._previous)


_FP32, _FP64, _BF16, _FP16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("32-true", _FP32, _FP32, _FP32),
        Precision("64-true", _FP64, _FP64, _FP64),
        Precision("bf16-mixed", _FP32, _BF16, _FP32),
        Precision("16-mixed", _FP32, _FP16, _FP32, scaled=True),
        Precision("bf16-true", _BF16, _BF16, _BF16),
        Precision("16-true", _FP16, _FP16, _FP16),
    )
}
_SHORT_FORMS = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "16": "16-mixed", "fp16": "16-mixed"}


def resolve_precision(given: str | int | None) -> Precision:
    """Return the precision that a name or a short form (``32``, ``16``, ``"fp16"``, ``"bf16"``, ``64``) stands for.

    For None it is fp32.

    Raises:
        UnknownNameError: the name is not known.
        ConfigurationError: it is neither a string nor an int.
    """
    if given is None:
        return PRECISIONS["32-true"]
    if isinstance(given, bool) or not isinstance(given, (str, int)):
        raise ConfigurationError(f"precision={given!r} must be a name such as 'bf16-mixed', or 32, 16 or 64.")
    name = _SHORT_FORMS.get(str(given), str(given))
    if name not in PRECISIONS:
        raise unknown("precision", name, [*PRECISIONS, *_SHORT_FORMS])
    return PRECISIONS[name]


class LossScaler:
    """Dynamic loss scaling (Micikevicius et al. 2018, "Mixed Precision Training").

    The loss is multiplied by ``scale`` before backward and gradients divided by it before they are used. An update
    whose gradients are not finite is skipped and the scale halved; after ``growth_interval`` good updates in a row it
    doubles.
    The scale is a number on the host: it is part of the factor that every loss is multiplied by anyway, and whether
    an update was good has to reach the host in any case, since counters and schedulers depend on it.
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
        """Adapt the scale to an update whose gradients, over all ranks, were finite or not."""
        if not finite:
            self.scale *= self.backoff_factor
            self._good_updates = 0
            return
        self._good_updates += 1
        if self._good_updates == self.growth_interval:
            self.scale *= self.growth_factor
            self._good_updates = 0

    def state_dict(self) -> dict[str, Any]:
        """Return scale and counter."""
        return {"scale": self.scale, "good_updates": self._good_updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over scale and counter."""
        self.scale = float(state["scale"])
        self._good_updates = int(state["good_updates"])
