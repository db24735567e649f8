"""Operations on gradients between the last backward pass of a window and the update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from ..checkpoint.finite_check import all_finite, scale_and_check
from ..core.arguments import NoArguments
from ..core.errors import ConfigurationError


class GradientOperations(NoArguments):
    """Scales, checks and clips gradients where ``parameter.grad`` is the full gradient; base class for other layouts.

    Methods marked "Collective" must be called by all ranks in the same order.
    """

    clips_by_value: bool = True
    """Whether ``clip_by_value`` can reach the gradients of the coming update."""

    def scale(self, parameters: Iterable[Tensor], factor: float) -> None:
        """Multiply gradients in place."""
        gradients = gradients_of(parameters)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def full(self, parameter: Tensor) -> Tensor | None:
        """Return the full gradient of a parameter that was passed to ``Strategy.setup``. Collective.

        Available between the last backward pass of a window and the update, which will apply it. None if no loss
        depends on the parameter; zeros if a strategy cannot exclude a parameter from its update (DeepSpeed).
        """
        return parameter.grad

    def are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Whether no gradient of the coming update is NaN or infinite, the same on all ranks. Collective.

        Waits for the device.
        """
        return all_finite([gradient for parameter in parameters if (gradient := parameter.grad) is not None])

    def scale_and_check(self, parameters: Iterable[Tensor], factor: float) -> bool:
        """Multiply gradients in place, and return whether they are finite, as ``scale`` and ``are_finite``. Collective.

        Override it where both can be one pass over the gradients.
        """
        kept = list(parameters)
        self.scale(kept, factor)
        return self.are_finite(kept)

    def discard(self) -> None:
        """Drop what is kept of gradients that are not finite, besides ``parameter.grad``. Called on all ranks."""

    def norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of the full gradient, a 0-d tensor, the same on all ranks. Collective."""
        return nn.utils.get_total_norm(gradients_of(parameters), norm_type)

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Scale gradients so that their norm, given as ``norm``, is at most ``max_norm``."""
        nn.utils.clip_grads_with_norm_(list(parameters), max_norm, norm)

    def clip_by_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Clamp every gradient's elements to ``[-limit, limit]``.

        Raises:
            ConfigurationError: ``clips_by_value`` is False.
        """
        present = [parameter for parameter in parameters if parameter.grad is not None]
        if present:
            # Without any gradient, torch's function raises an error.
            nn.utils.clip_grad_value_(present, limit)


class FullGradients(GradientOperations):
    """Operations on gradients that every rank holds in full, in ``parameter.grad``."""

    def scale_and_check(self, parameters: Iterable[Tensor], factor: float) -> bool:
        """Multiply and check gradients, in one pass where possible. Collective."""
        return scale_and_check(gradients_of(parameters), factor)


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that exist."""
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]


def no_clipping_by_value(strategy: str) -> ConfigurationError:
    """Return the error for clipping by value under a strategy whose gradients are in an engine."""
    return ConfigurationError(
        "gradient_clip_algorithm='value' needs gradients that can be changed before the update, and "
        f"strategy={strategy!r} holds them in its engine: use 'norm', which in a Fabric is "
        "clip_gradients(..., max_norm=...), or strategy='fsdp'."
    )
