"""Operations on gradients that differ between the three optimizers of DeepSpeed's engine.

They are those of stages 1 and 2 (``SplitGradients``), of stage 3 (``SplitParameters``), and of stage 1 in bf16
(``WholeGradients``), with what is common in ``Stage``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from typing import Any, Protocol

import torch
from torch import Tensor

from ...framework.core.errors import ConfigurationError
from .access import engine_runs
from .flat_groups import even_piece, full_size
from .state import EngineState


def arrived_twice(name: str, stage: int) -> ConfigurationError:
    """Return the error for a gradient that was reduced before the backward pass has computed all of it."""
    return ConfigurationError(
        f"'{name}' got a gradient twice in one backward pass, as a layer that runs twice does under torch's "
        f"checkpoint(use_reentrant=True), and ZeRO stage {stage} reduces the first one at once: pass "
        "use_reentrant=False, or use strategy='zero1'."
    )


class Update(Protocol):
    """The part of ``EngineUpdate`` that a stage uses."""

    engine: Any
    zero: Any
    state: EngineState

    def arrives(self) -> None:
        """Note that a gradient arrives."""

    def total_norm(self) -> Tensor:
        """Return the norm of all gradients, a 0-d tensor; infinite if it is not finite. Collective."""

    def known_norm(self) -> Tensor | None:
        """Return the norm including the loss scale if it was computed since the last backward pass, else None."""

    def scale_norm(self, factor: float | Tensor) -> None:
        """Scale the cached norm with gradients that were multiplied."""


class Stage:
    """The gradients in an optimizer of DeepSpeed's engine, and which parameters have one in this window, on this rank.

    A method without a statement is for optimizers that have something to do there.

    Args:
        update: the engine's update.
        parameters: the parameters that the engine trains.
    """

    def __init__(self, update: Update, parameters: Iterable[Tensor]) -> None:
        self.update, self.zero = update, update.zero
        self._trained = {id(one) for one in parameters}
        self._used: set[int] = set()
        self._factor = 1.0

    # ---- use of parameters ----------------------------------------------------------------------------------------

    def mark(self, parameter: Tensor, used: bool) -> None:
        """Record whether a parameter has a gradient."""
        (self._used.add if used else self._used.discard)(id(parameter))

    def unused(self) -> Set[int]:
        """Return the ``id`` of each parameter that has none."""
        return frozenset() if len(self._used) == len(self._trained) else self._trained - self._used

    # ---- passes ---------------------------------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Begin another window, whose gradients are neither scaled nor clipped yet."""
        self._used.clear()
        if self._factor != 1.0:
            self._factor = 1.0
            self.zero.custom_loss_scaler = False
        self.zero.clip_grad = 0.0

    def begin_pass(self) -> None:
        """Forget the gradients that the last backward pass has reduced."""

    def keep_gradients(self) -> None:
        """Add up the gradients of backward passes on each rank, until ``reduce``."""

    def reduce(self) -> None:
        """Average the gradients that backward passes have left over the ranks. Collective."""
        raise NotImplementedError

    def reopen(self) -> None:
        """Let the next backward pass add to gradients that were reduced."""

    def clear_unused(self) -> None:
        """Zero stale gradients of the last update for parameters that have no gradient in this one so far."""

    def complete(self) -> None:
        """Give the optimizer the gradients of parameters that the last pass of the window has not used."""

    # ---- between the passes and the update ------------------------------------------------------------------------

    def write(self, parameter: Any, gradient: Tensor) -> None:
        raise NotImplementedError

    def raw_norm(self) -> Any:
        """Return the norm of all gradients including the loss scale. Collective."""
        raise NotImplementedError

    def scale(self, factor: float) -> None:
        """Multiply gradients through the loss scale that the next step divides by: no pass over them is needed."""
        zero = self.zero
        self._factor *= factor
        zero.custom_loss_scaler = True
        zero.external_loss_scale = zero.loss_scaler.cur_scale / self._factor if self._factor else math.inf

    def clip(self, max_norm: float) -> None:
        """Let the next step scale the gradients so that their norm is at most ``max_norm``."""
        self.zero.clip_grad = max_norm

    def begin_update(self) -> None:
        """Prepare the engine's step."""

    def drop(self) -> None:
        """Drop the gradients."""
        raise NotImplementedError


class SplitGradients(Stage):
    """Stages 1 and 2."""

    def __init__(self, update: Update) -> None:
        super().__init__(update, (one for group in update.zero.bit16_groups for one in group))
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
        update.state.reduction = self
        self._next = 0
        self._arrived: set[int] = set()
        self._is_late = False
        self._process = self.zero.process_gradients
        self.zero.process_gradients = self._arrive
        self.zero.reduce_ready_partitions_and_remove_grads = self._reduce_ready
        update.engine.allreduce_gradients = self.reduce

    def begin_pass(self) -> None:
        self._next = 0
        self._arrived.clear()

    def _use_order(self, order: list[tuple[Any, int, str]]) -> None:
        self._order = order
        self._place = {id(one): place for place, (one, *_) in enumerate(order)}

    def begin_window(self) -> None:
        super().begin_window()
        # A rank without a batch begins no pass, but reduces all parameters too.
        self.begin_pass()

    def _keep_reduced(self, *args: Any, param_group_idx: int, **options: Any) -> Any:
        self._reduced[param_group_idx] = self.zero.all_grad_tensors[param_group_idx]
        return self._flat_partition(*args, param_group_idx=param_group_idx, **options)

    def reopen(self) -> None:
        # DeepSpeed would replace them.
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

    def begin_update(self) -> None:
        # The engine frees the gradients in its step.
        self._reduced.clear()

    def keep_gradients(self) -> None:
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

    def reduce(self) -> None:
        """Average the gradients that the hooks have left, as DeepSpeed does at the end of a backward pass. Collective.

        All ranks reduce the same parameters in the same order: one that a rank has not used has a gradient of zero. So
        there is nothing for ``clear_unused`` and ``complete`` to do.
        """
        zero = self.zero
        ends = self.update.engine.is_gradient_accumulation_boundary()
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
            # That of their arrival on rank 0, so that none waits.
            arrivals = self.update.state.world.broadcast_object(self._first_arrivals, 0)
            places = dict.fromkeys([*arrivals, *range(len(self._order))])
            self.learn_order([self._order[place][0] for place in places])

    def learned_order(self) -> list[Tensor]:
        """Return the parameters in the order in which gradients are reduced; empty before the first reduction."""
        return [] if self._first_arrivals is not None else [one for one, *_ in self._order]

    def learn_order(self, parameters: Sequence[Tensor]) -> None:
        """Reduce gradients in this order from now on, if it holds all parameters."""
        if {id(one) for one in parameters} == self._place.keys():
            self._use_order([self._order[self._place[id(one)]] for one in parameters])
            self._first_arrivals = None

    def write(self, parameter: Any, gradient: Tensor) -> None:
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

    def drop(self) -> None:
        zero = self.zero
        self.begin_update()
        zero.micro_step_id = -1
        zero.zero_grad(set_to_none=True)
        if zero.cpu_offload:
            zero.reset_cpu_buffers()
        for kept in (zero.averaged_gradients, zero.all_grad_tensors):
            for group in kept:
                kept[group] = None


class OrderedStream(torch.cuda.Stream):
    """A stream whose ``synchronize`` makes the current stream wait for it, and not the host.

    DeepSpeed 0.19.8 makes the host wait for the stream on which stage 3 reduces gradients, at the end of each backward
    pass. It then only queues further work on the device, so that it is enough if the current stream waits. Gradients
    that are offloaded are read by the host: there the stream stays as it is.
    """

    @classmethod
    def of(cls, stream: torch.cuda.Stream) -> OrderedStream:
        """Return another object for the same stream."""
        return cls(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)

    def synchronize(self) -> None:
        """Let work that is queued on the current stream from now on begin after the work of this stream."""
        torch.cuda.current_stream(self.device).wait_stream(self)

    def follow(self) -> None:
        """Let work that is queued on this stream from now on begin after the work of the current stream."""
        self.wait_stream(torch.cuda.current_stream(self.device))


def order_reductions(zero: Any) -> OrderedStream | None:
    """Replace the stream of an optimizer of stage 3; return the new one, or None where the host has to wait."""
    stream = zero.reduce_and_partition_stream
    if zero.offload_optimizer or not isinstance(stream, torch.cuda.Stream):
        return None
    ordered = OrderedStream.of(stream)
    zero.reduce_and_partition_stream = ordered
    return ordered


class SplitParameters(Stage):
    """Stage 3, whose engine adds to this rank's pieces of the gradients in every backward pass of an update."""

    def __init__(self, update: Update) -> None:
        self._groups: list[list[Any]] = update.zero.fp16_groups
        # In the order of the flat buffer, which has the padded gradients of all parameters one after the other.
        parameters = [one for group in self._groups for one in group]
        super().__init__(update, parameters)
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
        self._arrived.clear()

    def begin_window(self) -> None:
        super().begin_window()
        self._computed.clear()

    def _arrive(self, parameter: Tensor) -> None:
        self.update.arrives()
        if id(parameter) in self._arrived:
            names = {id(one): name for name, one in self.update.engine.module.module.named_parameters()}
            raise arrived_twice(names[id(parameter)], 3)
        for known in (self._arrived, self._computed, self._used):
            known.add(id(parameter))
        self._reduce_one(parameter)

    def reduce(self) -> None:
        """Complete the gradients, which backward passes have reduced."""
        if not (self.zero.offload_optimizer or self.zero.averaged_gradients):
            # No pass has run.
            self.zero.independent_gradient_partition_epilogue()
        self.complete()

    def write(self, parameter: Any, gradient: Tensor) -> None:
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

    def raw_norm(self) -> Any:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        if self.zero.offload_optimizer:
            return combine_grad_norm_groups([self._norm_of_group(group) for group in self._groups])
        gradients = self.zero.averaged_gradients
        return combine_grad_norm_groups(
            [self._norm_of_group(gradients[number], group) for number, group in enumerate(self._groups)]
        )

    def clear_unused(self) -> None:
        if len(self._computed) == len(self._trained):
            return
        stale = [part for key, (_, part) in self._mine.items() if key not in self._computed]
        for part in stale:
            part.zero_()
        if stale and self._stream is not None:
            # The engine looks for an overflow on that stream.
            self._stream.follow()

    def complete(self) -> None:
        if self.zero.offload_optimizer:
            # DeepSpeed has copied those of the last micro-batch to the masters.
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


class WholeGradients(Stage):
    """Stage 1 in bf16: the engine's bf16 optimizer, which accumulates full gradients in fp32 on every rank.

    It adds up in any order and in one place, reduces in passes that end a window alone, and zeroes gradients after each
    update. An average over ranks of an average is the same, so that passes may follow a reduction.
    """

    def __init__(self, update: Update) -> None:
        super().__init__(update, (one for group in update.zero.bf16_groups for one in group))
        self._places = {
            id(one): (number, place)
            for number, group in enumerate(self.zero.bf16_groups)
            for place, one in enumerate(group)
        }

    def mark(self, parameter: Tensor, used: bool) -> None:
        group, place = self._places[id(parameter)]
        self.zero.fp32_groups_has_gradients[group][place] = used

    def unused(self) -> Set[int]:
        has = self.zero.fp32_groups_has_gradients
        if all(map(all, has)):
            return frozenset()
        return frozenset(key for key, (group, place) in self._places.items() if not has[group][place])

    def write(self, parameter: Any, gradient: Tensor) -> None:
        group, place = self._places[id(parameter)]
        buffer = self.zero.fp32_groups_gradients[group][place]
        buffer.copy_(gradient.reshape(buffer.shape))

    def reduce(self) -> None:
        self.update.engine.allreduce_gradients()

    def begin_update(self) -> None:
        # The engine looks for an overflow in the gradients that this rank has used: all ranks must look at all.
        for has in self.zero.fp32_groups_has_gradients:
            has[:] = [True] * len(has)

    def raw_norm(self) -> Any:
        # DeepSpeed's own function waits for the device, and leaves out what other ranks alone have used.
        return torch.nn.utils.get_total_norm([one for group in self.zero.fp32_groups_gradients for one in group])

    def scale(self, factor: float | Tensor) -> None:
        torch._foreach_mul_(self.zero.fp32_groups_gradients_flat, factor)
        self.update.scale_norm(factor)

    def clip(self, max_norm: float) -> None:
        # Clipped here, as the engine would wait for the device to decide whether to.
        norm = self.update.total_norm()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        # The engine leaves out an update whose gradients are not finite.
        self.scale(torch.where(norm.isfinite(), factor, torch.ones_like(norm)))

    def drop(self) -> None:
        self.zero.clear_hp_grads()
        self.zero.clear_lp_grads()


def stage_of(update: Update) -> Stage:
    """Return the operations for the optimizer of an engine."""
    if hasattr(update.zero, "fp32_groups_gradients_flat"):
        return WholeGradients(update)
    return (SplitParameters if hasattr(update.zero, "fp16_partitioned_groups_flat") else SplitGradients)(update)
