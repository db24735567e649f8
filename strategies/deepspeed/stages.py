"""Operations on gradients in stage 3 and in stage 1 in bf16; those of stages 1 and 2 are in ``split_gradients.py``."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor

from .pieces import even_piece, full_size
from .reduction_stream import order_reductions
from .split_gradients import SplitGradients
from .stage_base import Scaling, UseOfParameters, arrived_twice


class SplitParameters(UseOfParameters):
    """Stage 3."""

    def __init__(self, update: Scaling) -> None:
        self.update, self.zero = update, update.zero
        self._groups: list[list[Any]] = self.zero.fp16_groups
        super().__init__(one for group in self._groups for one in group)
        # In the order of the flat buffer, which has the padded gradients of all parameters one after the other.
        parameters = [one for group in self._groups for one in group]
        parts = self.zero.grad_partitions_flat_buffer.split([one.partition_numel() for one in parameters])
        self._mine = {
            id(one): (one, part)
            for one, part in zip(parameters, parts, strict=True)
            if even_piece(full_size(one), update.state.world)[1]
        }
        offloads = self.zero.offload_optimizer
        norm = "complete_grad_norm_calculation_for_cpu_offload" if offloads else "get_grad_norm_direct"
        self._norm_of_group = getattr(self.zero, norm)
        setattr(self.zero, norm, self._norm_in_step)
        self._stream = order_reductions(self.zero)
        self._reduce_one = self.zero.reduce_ready_partitions_and_remove_grads
        self.zero.reduce_ready_partitions_and_remove_grads = self._arrive
        self._arrived: set[int] = set()
        # Parameters that got a gradient in a pass since the last update, whatever user code did to it.
        self._computed: set[int] = set()

    def begin_pass(self) -> None:
        """Forget the gradients that the last backward pass has reduced."""
        self._arrived.clear()

    def forget_use(self) -> None:
        """Begin another window."""
        super().forget_use()
        self._computed.clear()

    def _arrive(self, parameter: Tensor) -> None:
        self.update.arrives()
        if id(parameter) in self._arrived:
            names = {id(one): name for name, one in self.update.engine.module.module.named_parameters()}
            raise arrived_twice(names[id(parameter)], 3)
        for known in (self._arrived, self._computed, self._used):
            known.add(id(parameter))
        self._reduce_one(parameter)

    def reduce(self, engine: Any) -> None:
        """Complete the gradients, which backward passes have reduced."""
        if not (self.zero.offload_optimizer or self.zero.averaged_gradients):
            # No pass has run.
            self.zero.independent_gradient_partition_epilogue()
        self.complete()

    def write(self, parameter: Any, gradient: Tensor) -> None:
        """Replace the gradient of a parameter."""
        if id(parameter) in self._mine:
            _, part = self._mine[id(parameter)]
            start, length = even_piece(gradient.numel(), self.update.state.world)
            part.narrow(0, 0, length).copy_(gradient.reshape(-1).narrow(0, start, length))
            self._copy_to_masters([(parameter, part)])

    def _copy_to_masters(self, gradients: Iterable[tuple[Any, Tensor]]) -> None:
        """Copy this rank's parts of gradients to offloaded masters, which the engine does for those of the last pass.

        Not through ``safe_set_local_grad``, which needs the parameter and its group's other gradients in memory.
        """
        zero = self.zero
        on_disk: dict[int, tuple[list[int], list[Tensor]]] = {}
        for parameter, part in gradients if zero.offload_optimizer else ():
            key = zero.get_param_id(parameter)
            number, offset, _ = zero.grad_position[key]
            zero.norm_for_param_grads[key] = part.double().norm()
            if self.update.state.groups.swapped(number):
                offsets, parts = on_disk.setdefault(number, ([], []))
                offsets.append(offset)
                parts.append(part.to(zero.master_weights_and_grads_dtype, copy=True))
            else:
                zero.fp32_partitioned_groups_flat[number].grad.narrow(0, offset, part.numel()).copy_(part)
        for number, (offsets, parts) in on_disk.items():
            flat = zero.fp32_partitioned_groups_flat[number]
            zero.optimizer_swapper.swap_out_gradients(flat, gradient_offsets=offsets, gradient_tensors=parts)

    def _norm_in_step(self, *inputs: Any) -> Any:
        """Return the norm of a group's gradients, the last of the inputs; a known one of all for the first group."""
        known = self.update.known_norm()
        if known is None:
            return self._norm_of_group(*inputs)
        # The step combines the norms of all groups.
        return known if inputs[-1] is self._groups[0] else torch.zeros_like(known)

    def reopen(self) -> None:
        """Do nothing: the engine adds to its pieces in every backward pass of an update."""

    def release(self) -> None:
        """Do nothing: only the engine refers to the gradients."""

    def raw_norm(self) -> Any:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        if self.zero.offload_optimizer:
            return combine_grad_norm_groups([self._norm_of_group(group) for group in self._groups])
        gradients = self.zero.averaged_gradients
        return combine_grad_norm_groups(
            [self._norm_of_group(gradients[number], group) for number, group in enumerate(self._groups)]
        )

    def scale(self, factor: float) -> None:
        self.update.scale_by_loss_scale(factor)

    def clip(self, max_norm: float) -> None:
        self.zero.clip_grad = max_norm

    def clear_unused(self) -> None:
        """Zero stale gradients of the last update for parameters that have no gradient in this one so far."""
        if len(self._computed) == len(self._trained):
            return
        stale = [part for key, (_, part) in self._mine.items() if key not in self._computed]
        for part in stale:
            part.zero_()
        if stale and self._stream is not None:
            # The engine looks for an overflow on that stream.
            self._stream.follow()

    def complete(self) -> None:
        """Copy the missing gradients to offloaded masters: DeepSpeed copies only those of the last micro-batch."""
        if self.zero.offload_optimizer:
            known = self.zero.norm_for_param_grads
            self._copy_to_masters(one for one in self._mine.values() if self.zero.get_param_id(one[0]) not in known)

    def drop(self) -> None:
        zero = self.zero
        zero.zero_grad(set_to_none=True)
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
