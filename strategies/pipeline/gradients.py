"""Gradients of which each rank of a pipeline holds those of its stages, and all hold those of shared parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...framework.checkpoint.finite_check import all_finite, scale_and_check
from ...framework.distributed.world import World
from ...framework.parallel.gradient_operations import GradientOperations, gradients_of


class StagedGradients(GradientOperations):
    """Operations on gradients that are averaged over replicas, and summed over the pipeline where they are shared.

    Args:
        world: the ranks.
        pipeline: the ranks of this pipeline.
        replicas: the ranks that hold the same stages.
        owners: by the ``id`` of a parameter, the number of the rank in the pipeline that holds it; None for one that
            all hold.
    """

    def __init__(
        self, world: World, pipeline: dist.ProcessGroup, replicas: dist.ProcessGroup, owners: Mapping[int, int | None]
    ) -> None:
        self._world, self._pipeline, self._replicas = world, pipeline, replicas
        self._owners = owners

    # ---- after the last backward pass -----------------------------------------------------------------------------

    def reduce(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients over replicas, and sum those of shared parameters over the pipeline. Collective."""
        held = [parameter for parameter in parameters if not parameter.is_meta]
        count = self._world.data_size
        shared = [parameter for parameter in held if self._is_shared(parameter)]
        _reduce(shared, dist.group.WORLD, count)
        if count > 1:
            _reduce([parameter for parameter in held if not self._is_shared(parameter)], self._replicas, count)

    def _is_shared(self, parameter: Tensor) -> bool:
        return self._owners.get(id(parameter)) is None

    # ---- before the update ----------------------------------------------------------------------------------------

    def full(self, parameter: Tensor) -> Tensor | None:
        """Return the gradient of a parameter, sent by the rank that holds it. Collective."""
        owner = self._owners.get(id(parameter))
        if owner is None:
            return parameter.grad
        source = dist.get_global_rank(self._pipeline, owner)
        exists = torch.tensor([float(parameter.grad is not None)])
        dist.broadcast(exists, source, group=self._pipeline)
        if not exists.item():
            return None
        gradient = parameter.grad
        if gradient is None:
            gradient = torch.empty(parameter.shape, dtype=parameter.dtype, device=self._world.device)
        dist.broadcast(gradient, source, group=self._pipeline)
        return gradient

    def are_finite(self, parameters: Iterable[Tensor]) -> bool:
        """Whether the gradients of all ranks are finite, in one small reduction. Collective."""
        return self._everywhere(all_finite(gradients_of(parameters)))

    def scale_and_check(self, parameters: Iterable[Tensor], factor: float) -> bool:
        """Multiply and check this rank's gradients in one pass; return whether all ranks' are finite. Collective."""
        return self._everywhere(scale_and_check(gradients_of(parameters), factor))

    def _everywhere(self, is_finite: bool) -> bool:
        others = torch.tensor([float(not is_finite)], dtype=torch.float64)
        self._world.control_reduce(others).wait()
        return others.item() == 0.0

    @torch.no_grad()
    def norm(self, parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
        """Return the norm of the gradients of all stages, in one reduction over the pipeline. Collective."""
        held = [parameter for parameter in parameters if parameter.grad is not None]
        wide = torch.float64 if any(each.dtype == torch.float64 for each in held) else torch.float32
        copies = dist.get_world_size(self._pipeline)
        infinite = math.isinf(norm_type)
        empty = math.inf if infinite and norm_type < 0 else 0.0
        total = torch.tensor(empty, dtype=torch.float64, device=self._world.device)
        for parameter in held:
            own = torch.linalg.vector_norm(gradients_of([parameter])[0], norm_type, dtype=wide).double()
            if infinite:
                total = torch.minimum(total, own) if norm_type < 0 else torch.maximum(total, own)
                continue
            power = own if norm_type == 0 else own.pow(norm_type)
            total = total + (power / copies if self._is_shared(parameter) else power)
        operation = dist.ReduceOp.SUM
        if infinite:
            operation = dist.ReduceOp.MIN if norm_type < 0 else dist.ReduceOp.MAX
        dist.all_reduce(total, operation, group=self._pipeline)
        return (total if infinite or norm_type == 0 else total.pow(1.0 / norm_type)).to(wide)


@torch.no_grad()
def _reduce(parameters: Sequence[Tensor], group: dist.ProcessGroup | None, divisor: int) -> None:
    """Sum gradients over a group and divide them, in one message for each dtype. Collective.

    A parameter without a gradient on this rank counts as zero if another rank has one, and stays without if none has.
    """
    if not parameters:
        return
    # On the host, so that a device need not be waited for.
    present = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    dist.all_reduce(present, group=group)
    chosen = [parameter for parameter, count in zip(parameters, present.tolist(), strict=True) if count]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in chosen:
        by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for members in by_dtype.values():
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in members]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        if divisor != 1:
            flat.div_(divisor)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for parameter, part in zip(members, parts, strict=True):
            parameter.grad = part.view_as(parameter)
