"""One update through DeepSpeed's engine: norm, scaling and clipping of the gradients, the step, and dropping them.

The engine computes the norm of all gradients in its step. A norm requested before the step is computed in the same way
and cached, so that the step does not compute it again.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .optimizer import Following


class EngineUpdate:
    """Operations on an engine's gradients between the last backward pass of a window and the next window."""

    def __init__(self, engine: Any, following: Following) -> None:
        self.engine = engine
        self.zero = engine.optimizer
        self.follow = following
        self.holds_gradients = False
        """Whether a backward pass has run since the last update."""
        self.ends_window = True
        """Whether the next backward pass, or the last one, ends its window."""
        self._raw: Tensor | None = None
        self._factor = 1.0
        self._first = True
        self._use = _USES[self._kind()](self)

    def _kind(self) -> str:
        if hasattr(self.zero, "fp32_groups_gradients_flat"):
            return "bf16"
        return "parameters" if hasattr(self.zero, "fp16_partitioned_groups_flat") else "gradients"

    def sync(self, enabled: bool) -> None:
        """Set whether the next backward pass ends its window. Only then does the engine complete its reductions."""
        if enabled is not self.ends_window:
            self.ends_window = enabled
            self.engine.set_gradient_accumulation_boundary(enabled)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Compute gradients, which the engine scales in fp16 and reduces. Collective."""
        self.engine.backward(loss, scale_wrt_gas=False, **options)
        self.holds_gradients = True
        # Parameters unused in a micro-batch have stale or missing gradients, which the update would apply.
        if self._first:
            self._first = False
            self._use.clear_unused()
        if self.ends_window:
            self._use.complete()

    def norm(self) -> Tensor:
        """Return the norm of all gradients, a 0-d tensor; infinite if it is not finite. Collective."""
        if self._raw is None:
            self._raw = torch.as_tensor(self._use.raw_norm(), dtype=torch.float32)
        norm = self._raw / self._scale()
        return torch.where(norm < 0, torch.full_like(norm, math.inf), norm)

    def known_norm(self) -> Tensor | None:
        """Return the norm including the loss scale if it was computed since the last backward pass, else None."""
        return self._raw

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a factor: at once in stage 1 in bf16, else with effect in the next step."""
        self._use.scale(factor)

    def clip(self, max_norm: float) -> None:
        """Scale gradients in the next step so that their norm is at most ``max_norm``."""
        self.zero.clip_grad = max_norm

    def unscaled(self, gradient: Tensor) -> Tensor:
        """Divide the loss scale out of a gradient."""
        scale = self._scale()
        return gradient if scale == 1.0 else gradient / scale

    def step(self) -> bool:
        """Update the weights; return whether the update was applied. Collective."""
        # The user's schedulers change the groups of the user's optimizer, which the engine does not read.
        self.follow()
        self.engine.step()
        if self._factor != 1.0:
            self._factor = 1.0
            self.zero.custom_loss_scaler = False
        self.zero.clip_grad = 0.0
        self._raw = None
        self.holds_gradients = False
        self._first = True
        # False if the gradients have overflowed under the engine's own loss scale.
        applied: bool = self.engine.was_step_applied()
        return applied

    def drop(self) -> None:
        """Drop gradients that no update has used."""
        if not self.holds_gradients:
            return
        self._use.drop()
        if self._factor != 1.0:
            self._factor = 1.0
            self.zero.custom_loss_scaler = False
        self.zero.clip_grad = 0.0
        self._raw = None
        self.holds_gradients = False
        self._first = True

    def scale_by_loss_scale(self, factor: float) -> None:
        """Multiply gradients through the loss scale that the next step divides by: no pass over them is needed."""
        zero = self.zero
        self._factor *= factor
        zero.custom_loss_scaler = True
        zero.external_loss_scale = zero.loss_scaler.cur_scale / self._factor if self._factor else math.inf

    def scale_norm(self, factor: float) -> None:
        """Record that the gradients themselves were multiplied, and scale the cached norm with them."""
        if self._raw is not None:
            self._raw = self._raw * factor

    def _scale(self) -> float:
        return float(getattr(self.zero, "loss_scale", 1.0))


class _SplitGradients:
    """Stages 1 and 2."""

    def __init__(self, update: EngineUpdate) -> None:
        self.update, self.zero = update, update.zero
        self._compute = self.zero.scaled_global_norm
        self.zero.scaled_global_norm = self._norm_of_step
        self._mine = (
            {
                self.zero.get_param_id(parameter): (group, parameter)
                for group, parameters in enumerate(self.zero.params_in_partition)
                for parameter in parameters
            }
            if self.zero.cpu_offload
            else {}
        )

    def _norm_of_step(self, norm_type: float = 2) -> Any:
        known = self.update.known_norm()
        return self._compute(norm_type) if known is None else known

    def raw_norm(self) -> Any:
        self.zero._wait_for_offload_copies()
        return self._compute()

    def scale(self, factor: float) -> None:
        self.update.scale_by_loss_scale(factor)

    def clear_unused(self) -> None:
        """Zero stale gradients of the last update for parameters without a gradient in this one so far."""
        kept = self.zero.accumulated_grads_in_cpu if self._mine else {}
        used = self.zero._offload_accumulated_param_ids if kept else set()
        for number in kept.keys() - used if len(used) < len(kept) else ():
            kept[number].zero_()

    def complete(self) -> None:
        """Copy the missing gradients to offloaded masters: DeepSpeed copies only those of the last micro-batch."""
        zero = self.zero
        if not self._mine or len(zero.norm_for_param_grads) == len(self._mine):
            return
        for number, (group, parameter) in self._mine.items():
            if number in zero.norm_for_param_grads:
                continue
            if number not in zero._offload_accumulated_param_ids:
                _, _, start, length = zero.grad_position[number]
                zero.single_partition_of_fp32_groups[group].grad.narrow(0, int(start), int(length)).zero_()
            elif zero._use_compact_grad_partition_buffer(group):
                zero.copy_grads_in_partition(parameter, group)
            else:
                zero._restore_cpu_offload_grad_to_gpu(parameter)
                zero.set_norm_for_param_grad_in_gpu(parameter)
                zero.update_offload_overflow_tracker_for_param_grad(parameter)
                zero.async_inplace_copy_grad_to_fp32_buffer_from_gpu(parameter)

    def drop(self) -> None:
        zero = self.zero
        zero.micro_step_id = -1
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
            return
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in kept:
                kept[group] = None


class _SplitParameters:
    """Stage 3."""

    def __init__(self, update: EngineUpdate) -> None:
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

    def _norms_of_step(self) -> list[Any]:
        known = self.update.known_norm()
        norms: list[Any] = self._compute() if known is None else [known]
        return norms

    def raw_norm(self) -> Any:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        return combine_grad_norm_groups(self._compute())

    def scale(self, factor: float) -> None:
        self.update.scale_by_loss_scale(factor)

    def clear_unused(self) -> None:
        """Zero stale gradients of the last update for parameters that have no gradient in this one so far."""
        used = self.zero._offload_boundary_param_ids
        if len(used) == len(self._mine):
            return
        for number in self._mine.keys() - used:
            self._gradients[number].zero_()

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


class _WholeGradients:
    """Stage 1 in bf16: the engine's bf16 optimizer, which accumulates full gradients in fp32 on every rank."""

    def __init__(self, update: EngineUpdate) -> None:
        self.update, self.zero = update, update.zero

    def raw_norm(self) -> Any:
        from deepspeed.runtime.utils import get_global_norm_of_tensors

        gradients, _ = self.zero.get_grads_for_norm()
        return get_global_norm_of_tensors(input_tensors=gradients, mpu=None, norm_type=self.zero.norm_type)

    def scale(self, factor: float) -> None:
        torch._foreach_mul_(self.zero.fp32_groups_gradients_flat, factor)
        self.update.scale_norm(factor)

    def clear_unused(self) -> None:
        """Do nothing: gradients are zeroed after each update."""

    def complete(self) -> None:
        """Do nothing: gradients are accumulated in one place."""

    def drop(self) -> None:
        self.zero.clear_hp_grads()
        self.zero.clear_lp_grads()


_USES: dict[str, Any] = {"gradients": _SplitGradients, "parameters": _SplitParameters, "bf16": _WholeGradients}
