"""Operations on gradients between the last backward pass of a window and the update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from ..checkpoint.finite_check import all_finite, scale_and_check
from ..core.arguments import NoArguments
from ..core.errors import ConfigurationError
from ..distributed.world import World


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
        # Not by ``gradients_of``, as each call counts in the step of a small model.
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


def average_gradients(world: World, parameters: Sequence[Tensor]) -> None:
    """Average gradients in one flat reduction for each dtype. Collective.

    A parameter without gradient on this rank counts as zero if another rank has a gradient, and stays without one if no
    rank has one. On a CPU the same reduction carries the flags for this. On other devices they are reduced over the
    host, which would have to wait for the device to read them.
    """
    if world.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        # Parameters that require no gradient now are included: they may have one from before toggle_optimizer.
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    reduce = _reduce_group if world.device.type == "cpu" else _reduce_on_device
    for group in by_dtype.values():
        reduce(world, group)


def _reduce_on_device(world: World, parameters: list[Tensor]) -> None:
    present = torch.tensor([float(parameter.grad is not None) for parameter in parameters], dtype=torch.float64)
    anywhere = world.all_reduce(present).tolist()
    chosen = [parameter for parameter, count in zip(parameters, anywhere, strict=True) if count]
    if not chosen:
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in chosen]
    flat = world.all_reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]), "mean")
    parts = flat.split([gradient.numel() for gradient in gradients])
    for parameter, gradient, part in zip(chosen, gradients, parts, strict=True):
        parameter.grad = part.view_as(gradient)


def _reduce_group(world: World, parameters: list[Tensor]) -> None:
    present = [float(parameter.grad is not None) for parameter in parameters]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flags = torch.tensor(present, dtype=gradients[0].dtype, device=gradients[0].device)
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients] + [flags])
    world.all_reduce(flat, "mean")
    sizes = [gradient.numel() for gradient in gradients] + [len(present)]
    *parts, anywhere = flat.split(sizes)
    for parameter, gradient, part, exists in zip(parameters, gradients, parts, anywhere.tolist(), strict=True):
        if exists > 0:
            parameter.grad = part.view_as(gradient)
