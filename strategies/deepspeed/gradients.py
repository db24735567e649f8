"""Operations on the gradients that DeepSpeed's engine holds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ...framework.core.errors import ConfigurationError, LoopError
from ...framework.parallel.gradient_operations import GradientOperations, no_clipping_by_value
from .update import EngineUpdate


class EngineGradients(GradientOperations):
    """Operations on all gradients of an engine: it scales and clips them in its step, and cannot select parameters.

    Args:
        name: the name of the strategy, for errors.
        update: the engine's update; None if no module is trained, then all operations raise.
    """

    clips_by_value = False

    def __init__(self, name: str, update: EngineUpdate | None = None) -> None:
        self._name = name
        self._update = update

    @property
    def update(self) -> EngineUpdate:
        """The engine's update.

        Raises:
            LoopError: no module is being trained.
        """
        if self._update is None:
            raise LoopError(
                f"strategy={self._name!r} holds no module that is being trained: call setup with one first."
            )
        return self._update

    def scale(self, parameters: Iterable[Tensor], factor: float) -> None:
        """Multiply all gradients, regardless of ``parameters``: at once in stage 1 in bf16, else in the next step."""
        self.update.scale(factor)

    def full(self, parameter: Any) -> Tensor | None:
        """Return the full gradient of a parameter, gathered. Collective.

        It is available between a backward pass and the update. A parameter unused in the window has a gradient of zero.
        """
        return self.update.full(parameter)

    def are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the gradient norm, which the next step needs anyway, is finite. Collective."""
        return self.update.has_finite_norm()

    def norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients, regardless of ``parameters``; infinite if not finite. Collective.

        Raises:
            ConfigurationError: ``norm_type`` is not 2; the engine computes only the L2 norm.
        """
        if norm_type != 2.0:
            raise ConfigurationError(
                f"norm_type={norm_type} is not possible under strategy={self._name!r}, whose engine computes the L2 "
                "norm: use 2.0, or strategy='ddp'."
            )
        return self.update.norm()

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Clip all gradients by their norm: at once in stage 1 in bf16, else in the next step."""
        self.update.clip(max_norm)

    def clip_by_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Raise, as the engine clips by norm only.

        Raises:
            ConfigurationError: always.
        """
        raise no_clipping_by_value(self._name)
