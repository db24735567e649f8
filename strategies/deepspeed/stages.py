"""Operations on gradients that differ between the three optimizers of DeepSpeed's engine.

``SplitGradients`` belongs to stages 1 and 2, ``SplitParameters`` to stage 3, ``WholeGradients`` to stage 1 in bf16. The
attributes read here are private to DeepSpeed; they were checked with 0.19.8.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from .reduction_stream import order_reductions


class Scaling(Protocol):
    """The part of ``EngineUpdate`` that a stage uses."""

    zero: Any

    def norm(self) -> Tensor:
        """Return the norm of all gradients, a 0-d tensor; infinite if it is not finite. Collective."""

    def known_norm(self) -> Tensor | None:
        """Return the norm including the loss scale if it was computed since the last backward pass, else None."""

    def scale_by_loss_scale(self, factor: float) -> None:
        """Multiply gradients through the loss scale that the next step divides by."""

    def scale_norm(self, factor: float | Tensor) -> None:
        """Scale the cached norm with gradients that were multiplied."""


class SplitGradients:
    """Stages 1 and 2."""

    def __init__(self, update: Scaling) -> None:
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
        self._reduced: dict[int, list[Tensor]] = {}
        self._flat_partition = self.zero.get_flat_partition
        self.zero.get_flat_partition = self._keep_reduced

    def _keep_reduced(self, *args: Any, param_group_idx: int, **options: Any) -> Any:
        self._reduced[param_group_idx] = self.zero.all_grad_tensors[param_group_idx]
        return self._flat_partition(*args, param_group_idx=param_group_idx, **options)

    def reopen(self) -> None:
        """Let the next backward pass add to reduced gradients: DeepSpeed would replace them."""
        zero = self.zero
        if not self._mine:
            zero.all_grad_tensors.update(self._reduced)
            return
        kept, accumulated = zero.accumulated_grads_in_cpu, zero._offload_accumulated_param_ids
        for number, (group, parameter) in self._mine.items():
            if zero._use_compact_grad_partition_buffer(group) or number not in zero.norm_for_param_grads:
                continue
            _, source, start, length = (int(one) for one in zero.grad_position[number])
            if number not in accumulated:
                found = zero.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, start, length)
                if zero.low_precision_master_weights_and_grads:
                    kept[number] = found
                else:
                    kept.setdefault(number, torch.zeros(parameter.numel(), dtype=parameter.dtype, device=zero.device))
                    kept[number].narrow(0, source, length).copy_(found)
                accumulated.add(number)
        # The pass that ends the window next writes them, and `complete` those of parameters that it leaves unused.
        zero.norm_for_param_grads = {}

    def release(self) -> None:
        """Drop references to gradients, which the engine frees in its step."""
        self._reduced.clear()

    def keep_gradients(self) -> None:
        """Add up the gradients of backward passes on each rank, until ``reduce``."""
        zero = self.zero
        # In stage 2, gradients of a lower dtype would be added up in that dtype.
        zero.use_grad_accum_attribute = zero.use_separate_grad_accum
        zero.process_gradients = self._keep_gradient

    def _keep_gradient(self, parameter: Tensor, group: int) -> None:
        if self.zero.use_grad_accum_attribute:
            self.zero._fill_param_grad_accum_attribute(parameter)

    def reduce(self, engine: Any) -> None:
        """Average the gradients that were kept, as the hooks and the end of a backward pass do. Collective."""
        zero = self.zero
        zero.set_gradient_accumulation_boundary(True)
        zero.setup_buckets()
        name = "grad_accum" if zero.use_grad_accum_attribute else "grad"
        for number, group in enumerate(zero.bit16_groups):
            for parameter in group:
                if not parameter.requires_grad:
                    continue
                if getattr(parameter, name) is None:
                    # Other ranks may have used it, and all reduce the same buckets.
                    setattr(parameter, name, torch.zeros_like(parameter, dtype=zero._gradient_reduction_buffer_dtype()))
                # With the copy in the bucket, the gradient's own memory is freed.
                zero.reduce_independent_p_g_buckets_and_remove_grads(parameter, number)
        zero.overlapping_partition_gradients_reduce_epilogue()

    def _norm_of_step(self, norm_type: float = 2) -> Any:
        known = self.update.known_norm()
        # The step looks at it once to find an overflow, and again to clip: on the host only the copy waits.
        return (self._compute(norm_type) if known is None else known).cpu()

    def raw_norm(self) -> Any:
        self.zero._wait_for_offload_copies()
        return self._compute()

    def scale(self, factor: float) -> None:
        self.update.scale_by_loss_scale(factor)

    def clip(self, max_norm: float) -> None:
        self.zero.clip_grad = max_norm

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
        self.release()
        zero.micro_step_id = -1
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in kept:
                kept[group] = None


class SplitParameters:
    """Stage 3."""

    def __init__(self, update: Scaling) -> None:
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
