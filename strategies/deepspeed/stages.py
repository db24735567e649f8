"""Operations on gradients in stage 3 and in stage 1 in bf16; those of stages 1 and 2 are in ``split_gradients.py``.

The attributes read here are private to DeepSpeed; they were checked with 0.19.8.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from .reduction_stream import order_reductions
from .split_gradients import SplitGradients
from .stage_base import Scaling, UseOfParameters, arrived_twice


class SplitParameters(UseOfParameters):
    """Stage 3."""

    def __init__(self, update: Scaling) -> None:
        super().__init__(one for group in update.zero.fp16_groups for one in group)
        self.update, self.zero = update, update.zero
        self._compute = self.zero._get_norm_groups
        self.zero._get_norm_groups = self._norms_of_step
        rank_of = self.zero._get_param_partition_rank
        self._mine = {
            parameter.ds_id: parameter
            for parameters in self.zero.fp16_groups
            for parameter in parameters
            if parameter.partition_numel() * rank_of(parameter) < parameter.ds_numel
        }
        self._gradients = self.zero._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition
        self._stream = order_reductions(self.zero)
        self._reduce_one = self.zero.reduce_ready_partitions_and_remove_grads
        self.zero.reduce_ready_partitions_and_remove_grads = self._arrive
        self._arrived: set[int] = set()

    def begin_pass(self) -> None:
        """Forget the gradients that the last backward pass has reduced."""
        self._arrived.clear()

    def _arrive(self, parameter: Tensor) -> None:
        self.update.arrives()
        if id(parameter) in self._arrived:
            names = {id(one): name for name, one in self.update.engine.module.module.named_parameters()}
            raise arrived_twice(names[id(parameter)], 3)
        self._arrived.add(id(parameter))
        self._used.add(id(parameter))
        self._reduce_one(parameter)

    def reduce(self, engine: Any) -> None:
        """Complete the gradients, which backward passes have reduced."""
        if not (self.zero.offload_optimizer or self.zero.averaged_gradients):
            # No pass has run.
            self.zero.independent_gradient_partition_epilogue()
        self.complete()

    def write(self, parameter: Any, gradient: Tensor) -> None:
        """Replace the gradient of a parameter."""
        from deepspeed.utils import safe_set_local_grad

        size = parameter.partition_numel()
        start = min(size * self.zero._get_param_partition_rank(parameter), gradient.numel())
        piece = gradient.reshape(-1)[start : start + size]
        if parameter.ds_id in self._mine:
            # Later backward passes add to this tensor, which an offloaded gradient is a copy of.
            self._gradients[parameter.ds_id].view(-1).narrow(0, 0, piece.numel()).copy_(piece)
        safe_set_local_grad(parameter, torch.nn.functional.pad(piece, (0, size - piece.numel())))

    def _norms_of_step(self) -> list[Any]:
        known = self.update.known_norm()
        norms: list[Any] = self._compute() if known is None else [known]
        return norms

    def reopen(self) -> None:
        """Do nothing: the engine adds to its pieces in every backward pass of an update."""

    def release(self) -> None:
        """Do nothing: only the engine refers to the gradients."""

    def raw_norm(self) -> Any:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        return combine_grad_norm_groups(self._compute())

    def scale(self, factor: float) -> None:
        self.update.scale_by_loss_scale(factor)

    def clip(self, max_norm: float) -> None:
        self.zero.clip_grad = max_norm

    def clear_unused(self) -> None:
        """Zero stale gradients of the last update for parameters that have no gradient in this one so far."""
        used = self.zero._offload_boundary_param_ids
        if len(used) == len(self._mine):
            return
        for number in self._mine.keys() - used:
            self._gradients[number].zero_()
        if self._stream is not None:
            # The engine looks for an overflow on that stream.
            self._stream.follow()

    def complete(self) -> None:
        """Copy the missing gradients to offloaded masters: DeepSpeed copies only those of the last micro-batch."""
        zero = self.zero
        if zero.offload_optimizer and len(zero.norm_for_param_grads) < len(self._mine):
            zero._offload_boundary_param_ids.update(self._mine)
            zero._finalize_offload_gradient_accumulation()

    def drop(self) -> None:
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        zero._offload_boundary_param_ids = set()
        for bucket in zero.ipg_buckets.values():
            bucket.clear_params()
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()
        else:
            zero.averaged_gradients = {}


class WholeGradients:
    """Stage 1 in bf16: the engine's bf16 optimizer, which accumulates full gradients in fp32 on every rank."""

    def __init__(self, update: Scaling) -> None:
        self.update, self.zero = update, update.zero
        self._places = {
            id(one): (number, place)
            for number, group in enumerate(self.zero.bf16_groups)
            for place, one in enumerate(group)
        }

    def mark(self, parameter: Tensor, used: bool) -> None:
        """Record whether a parameter has a gradient."""
        group, place = self._places[id(parameter)]
        self.zero.fp32_groups_has_gradients[group][place] = used

    def unused(self) -> Set[int]:
        """Return the ``id`` of each parameter that has none."""
        has = self.zero.fp32_groups_has_gradients
        if all(map(all, has)):
            return frozenset()
        return frozenset(key for key, (group, place) in self._places.items() if not has[group][place])

    def forget_use(self) -> None:
        """Do nothing: the engine does it."""

    def write(self, parameter: Any, gradient: Tensor) -> None:
        """Replace the gradient of a parameter."""
        group, place = self._places[id(parameter)]
        buffer = self.zero.fp32_groups_gradients[group][place]
        buffer.copy_(gradient.reshape(buffer.shape))

    def begin_pass(self) -> None:
        """Do nothing: full gradients are added up in any order."""

    def keep_gradients(self) -> None:
        """Do nothing: only passes that end a window reduce gradients."""

    def reduce(self, engine: Any) -> None:
        """Average the gradients over the ranks. Collective."""
        engine.allreduce_gradients()

    def reopen(self) -> None:
        """Do nothing: the average over ranks of an average is the same."""

    def release(self) -> None:
        """Do nothing: only the engine refers to the gradients."""

    def raw_norm(self) -> Any:
        gradients, _ = self.zero.get_grads_for_norm()
        # DeepSpeed's own function waits for the device.
        return torch.nn.utils.get_total_norm(gradients)

    def scale(self, factor: float | Tensor) -> None:
        torch._foreach_mul_(self.zero.fp32_groups_gradients_flat, factor)
        self.update.scale_norm(factor)

    def clip(self, max_norm: float) -> None:
        """Clip here, as the engine would wait for the device to decide whether to."""
        norm = self.update.norm()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # The engine leaves out an update whose gradients are not finite.
        self.scale(torch.where(norm.isfinite(), factor, torch.ones_like(norm)))

    def clear_unused(self) -> None:
        """Do nothing: gradients are zeroed after each update."""

    def complete(self) -> None:
        """Do nothing: gradients are accumulated in one place."""

    def drop(self) -> None:
        self.zero.clear_hp_grads()
        self.zero.clear_lp_grads()


def stage_of(update: Scaling) -> Any:
    """Return the operations for the optimizer of an engine."""
    if hasattr(update.zero, "fp32_groups_gradients_flat"):
        return WholeGradients(update)
    return (SplitParameters if hasattr(update.zero, "fp16_partitioned_groups_flat") else SplitGradients)(update)
