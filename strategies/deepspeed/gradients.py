"""Operations on the gradients that DeepSpeed's engine holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...framework.core.errors import ConfigurationError, LoopError
from ...framework.parallel.gradient_operations import GradientOperations, no_clipping_by_value
from .update import EngineUpdate


class EngineGradients(GradientOperations):
    """Operations on the gradients of an engine, which scales and clips all of them in its step.

    Those of some parameters are gathered one by one, for their norm, and again to be clipped.

    Args:
        name: the name of the strategy, for errors.
        update: the engine's update; None if no module is trained, then all operations raise.
    """

    clips_by_value = False

    def __init__(self, name: str, update: EngineUpdate | None = None) -> None:
        self._name = name
        self._update = update
        self._own_norm: Tensor | None = None

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
        """Return the norm of the gradients of these parameters; infinite if not finite. Collective.

        Raises:
            ConfigurationError: ``norm_type`` is not 2 for all parameters; the engine computes only the L2 norm.
        """
        chosen = self._of_engine(parameters)
        if len(chosen) < len(self._trained):
            gradients = [gradient for each in chosen if (gradient := self.update.lent.get(each)) is not None]
            norm = torch.nn.utils.get_total_norm(gradients, norm_type) if gradients else torch.zeros(())
            return norm.to(self.update.engine.device)
        if norm_type != 2.0:
            raise ConfigurationError(
                f"norm_type={norm_type} is not possible under strategy={self._name!r}, whose engine computes the L2 "
                "norm: use 2.0, or strategy='ddp'."
            )
        self._own_norm = self.update.norm()
        return self._own_norm

    @property
    def _trained(self) -> Collection[int]:
        return self.update.state.groups.trained

    def _of_engine(self, parameters: Iterable[Any]) -> Sequence[Any]:
        return list({id(each): each for each in parameters if id(each) in self._trained}.values())

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Clip the gradients of these parameters; of all of them by their own norm in the engine's next step.

        In stage 1 in bf16, and for some of the parameters, the gradients are clipped at once.
        """
        chosen = self._of_engine(parameters)
        if len(chosen) == len(self._trained) and norm is self._own_norm:
            self.update.clip(max_norm)
            return
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # The engine leaves out an update whose gradients are not finite.
        factor = torch.where(norm.isfinite(), factor, torch.ones_like(factor))
        if len(chosen) == len(self._trained):
            self.update.scale(factor.item())
        else:
            self.update.scale_some(chosen, factor)

    def clip_by_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Raise, as the engine clips by norm only.

        Raises:
            ConfigurationError: always.
        """
        raise no_clipping_by_value(self._name)
