"""Operations on gradients in stages 1 and 2."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .access import engine_runs
from .stage_base import Scaling, UseOfParameters, arrived_twice


class SplitGradients(UseOfParameters):
    """Stages 1 and 2."""

    def __init__(self, update: Scaling) -> None:
        super().__init__(one for group in update.zero.bit16_groups for one in group)
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
        groups = {id(one): number for number, group in enumerate(self.zero.bit16_groups) for one in group}
        named = list(update.engine.module.module.named_parameters())
        # Until the first reduction has shown the order in which gradients arrive: roughly the reverse of that in which
        # layers are defined.
        self._use_order([(one, groups[id(one)], name) for name, one in reversed(named) if id(one) in groups])
        self._first_arrivals: list[int] | None = []
        self._next = 0
        self._arrived: set[int] = set()
        self._is_late = False
        self._process = self.zero.process_gradients
        if not self.zero.zenflow:
            self.zero.process_gradients = self._arrive
            self.zero.reduce_ready_partitions_and_remove_grads = self._reduce_ready
            update.engine.allreduce_gradients = partial(self.reduce, update.engine)

    def begin_pass(self) -> None:
        """Forget the gradients that the last backward pass has reduced."""
        self._next = 0
        self._arrived.clear()

    def _use_order(self, order: list[tuple[Any, int, str]]) -> None:
        self._order = order
        self._place = {id(one): place for place, (one, *_) in enumerate(order)}

    def _keep_reduced(self, *args: Any, param_group_idx: int, **options: Any) -> Any:
        self._reduced[param_group_idx] = self.zero.all_grad_tensors[param_group_idx]
        return self._flat_partition(*args, param_group_idx=param_group_idx, **options)

    def reopen(self) -> None:
        """Let the next backward pass add to reduced gradients: DeepSpeed would replace them."""
        zero = self.zero
        if not self._mine:
            zero.all_grad_tensors.update(self._reduced)
            return
        kept = zero.accumulated_grads_in_cpu
        for number, (group, parameter) in self._mine.items():
            # Gradients of a lower dtype are added up in ``averaged_gradients`` until the step.
            if zero.averaged_gradients.get(group) is not None or number not in zero.norm_for_param_grads:
                continue
            _, source, start, length = (int(one) for one in zero.grad_position[number])
            # Also of those that were added up on the CPU: the user may have changed them.
            found = zero.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, start, length)
            if zero.low_precision_master_weights_and_grads:
                kept[number] = found
            else:
                kept.setdefault(number, torch.zeros(parameter.numel(), dtype=parameter.dtype, device=zero.device))
                kept[number].view(-1).narrow(0, source, length).copy_(found)
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
        self._is_late = True

    def _arrive(self, parameter: Tensor, group: int) -> None:
        """Take a gradient of a backward pass."""
        self.update.arrives()
        self._used.add(id(parameter))
        if self._first_arrivals is not None:
            self._first_arrivals.append(self._place[id(parameter)])
        self._process(parameter, group)

    def _reduce_ready(self, parameter: Tensor, group: int) -> None:
        """Reduce those gradients for which all before them in the common order are there."""
        if self._is_late or not (self.zero.partition_gradients or self.zero.is_gradient_accumulation_boundary()):
            return
        key = id(parameter)
        if self._place[key] < self._next:
            raise arrived_twice(self._order[self._place[key]][2], 2)
        self._arrived.add(key)
        while self._next < len(self._order) and id(self._order[self._next][0]) in self._arrived:
            self._reduce_next()

    def _reduce_next(self) -> None:
        parameter, group, _ = self._order[self._next]
        self._next += 1
        # With the copy in the bucket, the gradient's own memory is freed.
        self.zero.reduce_independent_p_g_buckets_and_remove_grads(parameter, group)

    def reduce(self, engine: Any) -> None:
        """Average the gradients that the hooks have left, as DeepSpeed does at the end of a backward pass. Collective.

        All ranks reduce the same parameters in the same order: one that a rank has not used has a gradient of zero.
        """
        zero = self.zero
        ends = engine.is_gradient_accumulation_boundary()
        zero.set_gradient_accumulation_boundary(ends)
        if not (ends or zero.partition_gradients):
            return
        zero.setup_buckets()
        accumulates = zero.use_grad_accum_attribute
        name, dtype = ("grad_accum", zero.gradient_accumulation_dtype) if accumulates else ("grad", zero.dtype)
        # Also in a backward pass that was not started by the engine.
        with engine_runs:
            while self._next < len(self._order):
                parameter: Any = self._order[self._next][0]
                if getattr(parameter, name) is None:
                    setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype))
                self._reduce_next()
        zero.overlapping_partition_gradients_reduce_epilogue()
        if zero.cpu_offload:
            # The host reads and writes the gradients from here on, which the device may still be copying to it.
            from deepspeed.accelerator import get_accelerator

            get_accelerator().synchronize()
        if self._first_arrivals is not None:
            self._learn_order(self._first_arrivals)

    def _learn_order(self, arrivals: list[int]) -> None:
        """Reduce gradients in the order of their arrival on rank 0 from now on, so that none waits. Collective."""
        places = dict.fromkeys([*self.update.state.world.broadcast_object(arrivals, 0), *range(len(self._order))])
        self._use_order([self._order[place] for place in places])
        self._first_arrivals = None

    def write(self, parameter: Any, gradient: Tensor) -> None:
        """Replace the gradient of a parameter."""
        parameter.set_full_hp_grad(gradient)
        number = self.zero.get_param_id(parameter)
        if number in self._mine:
            # DeepSpeed has computed the norm of an offloaded gradient when it copied it.
            _, _, start, length = (int(one) for one in self.zero.grad_position[number])
            flat = self.zero.single_partition_of_fp32_groups[self._mine[number][0]].grad
            self.zero.norm_for_param_grads[number] = flat.view(-1).narrow(0, start, length).double().norm()

    def _norm_of_step(self, norm_type: float = 2) -> Any:
        known = self.update.known_norm()
        # The step looks at it once to find an overflow, and again to clip: on the host only the copy waits.
        return (self._compute(norm_type) if known is None else known).cpu()

    def raw_norm(self) -> Any:
        return self._compute()

    def scale(self, factor: float) -> None:
        self.update.scale_by_loss_scale(factor)

    def clip(self, max_norm: float) -> None:
        self.zero.clip_grad = max_norm

    def clear_unused(self) -> None:
        """Do nothing: every reduction covers all parameters."""

    def complete(self) -> None:
        """Do nothing: every reduction covers all parameters."""

    def drop(self) -> None:
        zero = self.zero
        self.release()
        zero.micro_step_id = -1
        zero.zero_grad(set_to_none=True)
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in kept:
                kept[group] = None
