"""Operations on sharded gradients: local computation, and one reduction for the norm."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...framework.checkpoint.finite_check import all_finite, scale_and_check
from ...framework.distributed.world import World
from ...framework.parallel.gradient_operations import GradientOperations
from .local_shards import local_of


class ShardedGradients(GradientOperations):
    """Operations on gradients of which each rank holds shards."""

    def __init__(self, world: World) -> None:
        self._world = world

    def scale(self, parameters: Iterable[Tensor], factor: float) -> None:
        """Multiply this rank's shards of the gradients."""
        gradients = local_gradients(parameters)
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def full(self, parameter: Tensor) -> Tensor | None:
        """Gather the gradient of a parameter. Collective."""
        gradient = parameter.grad
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient

    def are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Whether this rank's and all other ranks' shards are finite, in one small reduction. Collective."""
        return self._everywhere(all_finite(local_gradients(parameters)))

    def scale_and_check(self, parameters: Iterable[Tensor], factor: float) -> bool:
        """Multiply and check this rank's shards in one pass; return whether all ranks' are finite. Collective."""
        return self._everywhere(scale_and_check(local_gradients(parameters), factor))

    def _everywhere(self, is_finite: bool) -> bool:
        (others,) = self._world.control_reduce([not is_finite]).wait()
        return others == 0.0

    @torch.no_grad()
    def norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of all gradients together, a 0-d tensor, the same on all ranks, in one reduction. Collective.

        It is ``(sum over ranks and elements of |g|^p / copies)^(1/p)``, as ``copies`` ranks hold the same element. Sums
        are in float64, as a high power would leave the range of float32.
        """
        gradients = [(parameter.grad, parameter) for parameter in parameters if parameter.grad is not None]
        wide = torch.float64 if any(each.dtype == torch.float64 for each, _ in gradients) else torch.float32
        kept = [(part, self._copies(whole)) for each, whole in gradients if (part := local_of(each)).numel()]
        device = kept[0][0].device if kept else self._world.device
        norms = torch.stack(_norms([part for part, _ in kept], norm_type, wide)).double() if kept else None
        if math.isinf(norm_type):
            least = norm_type < 0
            if norms is None:
                norms = torch.tensor([math.inf if least else 0.0], dtype=torch.float64, device=device)
            extreme = norms.amin() if least else norms.amax()
            return self._world.all_reduce(extreme, "min" if least else "max").to(wide)
        if norms is None:
            total = torch.zeros((), dtype=torch.float64, device=device)
        else:
            powers = norms if norm_type == 0 else norms.pow(norm_type)
            if any(copies != 1 for _, copies in kept):
                powers = powers / _on_device([copies for _, copies in kept], device)
            total = powers.sum()
        self._world.all_reduce(total, "sum")
        return (total if norm_type == 0 else total.pow(1.0 / norm_type)).to(wide)

    def _copies(self, parameter: Tensor) -> int:
        """Return the number of ranks that hold the same shard of a parameter and its gradient."""
        if not isinstance(parameter, DTensor):
            return self._world.size
        parts = 1
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            parts *= 1 if placement.is_replicate() else size
        return self._world.size // parts

    def clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
        """Scale this rank's shards of the gradients."""
        scale_to_norm(local_gradients(parameters), max_norm, norm)

    def clip_by_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Clamp this rank's shards of the gradients."""
        gradients = local_gradients(parameters)
        if gradients:
            torch._foreach_clamp_min_(gradients, -limit)
            torch._foreach_clamp_max_(gradients, limit)


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shards of the gradients that exist."""
    return [local_of(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Return numbers as a float64 tensor on a device, without waiting for the computations that are queued there."""
    held = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return held.to(device, non_blocking=True)


def _norms(parts: list[Tensor], norm_type: float, wide: torch.dtype) -> list[Tensor]:
    if norm_type in (1.0, 2.0) and all(part.dtype == parts[0].dtype for part in parts):
        return list(torch._foreach_norm(parts, norm_type, dtype=wide))
    return [torch.linalg.vector_norm(part, norm_type, dtype=wide) for part in parts]


@torch.no_grad()
def scale_to_norm(gradients: list[Tensor], max_norm: float, norm: Tensor) -> None:
    """Multiply gradients in place by ``min(1, max_norm / (norm + 1e-6))``, as torch does."""
    if gradients:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0).to(gradients[0].device))
