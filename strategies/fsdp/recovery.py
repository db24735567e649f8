"""Passes of a sharded model that a rank without memory completes for the other ranks.

The forward and backward passes of ``fully_shard`` gather parameters and reduce gradients. A rank that runs out of
memory in a pass calls those collectives of it that are missing, without computing: it sends its shards of the
parameters, which are right, and gradients of zero, which are dropped with the window.

All passes call the same ones, so it knows them from its newest complete pass. Until every rank has completed one, the
ranks announce their calls in the store of the process group. With replicas of the shards, each reduction is followed by
one over the replicas. Gradients are reduced in every pass, not only in the last one of a window, so that all passes
call the same; this also saves the memory of gradients that are not reduced yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from ...framework.core.torch_versions import can_abandon_fsdp_passes, drop_unsharded_gradient
from ...framework.distributed.devices import empty_caches
from ...framework.distributed.rendezvous import shared_store
from ...framework.distributed.world import World
from ...framework.parallel.strategy import Recovery, Repeat, Strategy
from .model import ShardedModel
from .torch_fsdp import groups_of

_Call = list[Any]
"""A collective: the number of its parameter group, and of a reduction the elements, dtype and operation."""
_POLL_SECONDS = 0.001
# The former names are those of torch before 2.13.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def recovery_of_shards(can_join: bool) -> tuple[Recovery | None, str]:
    """Return the recovery of a strategy that is not set up, None if it has none, and the reason for that.

    Args:
        can_join: whether a rank can call the collectives of a pass from its own shards.
    """
    if can_join and can_abandon_fsdp_passes(FSDPModule):
        return ShardedRecovery(), ""
    return None, "which needs a newer torch for this, such as 2.13" if can_join else Strategy.prevents_recovery


class _Reported:
    """A collective of a parameter group, in place of torch's own, which reports its calls."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer for the collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self._call(*args, **options)


class ShardedRecovery(Recovery):
    """Completes passes of a sharded model on a rank that has run out of memory.

    Args:
        model: the sharded model; None before set-up. With one, constructing it is collective.
    """

    def __init__(self, model: ShardedModel | None = None) -> None:
        self._calls: list[_Call] = []
        """The collectives of the pass in progress that this rank has called."""
        self._known: list[_Call] | None = None
        """The collectives of a complete pass; None until all ranks know them."""
        self._newest: list[_Call] = []
        """The collectives of the newest complete pass of this rank."""
        self._is_open = False
        self._passes = 0
        if model is None:
            return
        self._model, self._world = model, model.world
        self._groups = [group for part in model.parts for group in groups_of(part)]
        self._store = _own_store(model.world)
        number = 0
        for part in model.parts:
            if groups_of(part):
                part.set_custom_all_gather(_Reported(partial(self._gather, number)))  # type: ignore[arg-type]
                part.set_custom_reduce_scatter(_Reported(partial(self._reduce_scatter, number)))  # type: ignore[arg-type]
                number += 1

    # ---- passes of this rank ----------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        self._is_open = True

    def end_pass(self) -> None:
        if self._known is None:
            self._store.set(self._key("end"), str(len(self._calls)))
        self._newest = self._calls
        self._next_pass()

    def end_window(self) -> None:
        self._known = self._newest

    def refresh(self) -> None:
        """Forget the collectives of a pass, which may change. On all ranks."""
        self._known = None

    def _next_pass(self) -> None:
        self._calls, self._is_open = [], False
        self._passes += 1

    def _gather(
        self, number: int, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        run = partial(_all_gather, output_tensor, input_tensor, group=group, async_op=async_op)
        return self._observed([number], run)

    def _reduce_scatter(
        self, number: int, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        call = [number, input_tensor.numel(), str(input_tensor.dtype).removeprefix("torch."), op.name]
        run = partial(_reduce_scatter, output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return self._observed(call, run)

    def _observed(self, call: _Call, run: Callable[[], Any]) -> Any:
        if not self._is_open:
            return run()
        if self._known is None:
            # Before the call, which returns only when a rank without memory has joined it.
            self._store.set(self._key(str(len(self._calls))), json.dumps(call))
        result = run()
        self._calls.append(call)
        return result

    # ---- on a rank without memory -----------------------------------------------------------------------------------

    def join(self) -> None:
        # Calls from here on are not those of a pass of this rank.
        self._is_open = False
        self._model.root.reset_iter_state()
        for record in self._model.gradients.parameters():
            drop_unsharded_gradient(record)
        empty_caches()
        done = len(self._calls)
        if self._known is not None:
            for call in self._known[done:]:
                self._repeat(call)
        else:
            self._follow(done)
        self._next_pass()

    def _follow(self, done: int) -> None:
        """Call the collectives that other ranks announce, until they end the pass or have all run out of memory."""
        self._store.add(self._key("failed"), 1)
        while True:
            # Read before the announcements: a rank that has ended or failed makes no more of them.
            has_ended = self._store.check([self._key("end")])
            has_ended = has_ended or self._store.add(self._key("failed"), 0) == self._world.size
            if self._store.check([self._key(str(done))]):
                self._repeat(json.loads(self._store.get(self._key(str(done)))))
                done += 1
            elif has_ended:
                return
            else:
                time.sleep(_POLL_SECONDS)

    def _repeat(self, call: _Call) -> None:
        number, *reduction = call
        group = self._groups[number]
        if not reduction:
            group.unshard()
            group.wait_for_unshard()
            group.reshard()
            return
        elements, dtype, op = reduction
        mesh, reduction_op = self._model.sharding.mesh, getattr(dist.ReduceOp, op)
        full = torch.zeros(elements, dtype=getattr(torch, dtype), device=group.device)
        shard = full.new_empty(elements // mesh["shard"].size())
        _reduce_scatter(shard, full, op=reduction_op, group=mesh.get_group("shard"))
        if "replicate" in (mesh.mesh_dim_names or ()):
            # Right after it, the groups of ranks that hold the same shard reduce it, by the same operation.
            dist.all_reduce(shard, reduction_op, mesh.get_group("replicate"))

    def _key(self, name: str) -> str:
        return f"{self._passes}/{name}"

    # ---- updates ----------------------------------------------------------------------------------------------------

    def update(self, optimizer: Optimizer, step: Callable[[], bool], repeat: Repeat) -> bool:
        """Apply an update; repeat it where memory is short, unless it exchanges parameters. Collective."""
        return step() if self._model.full_updates else bool(repeat(optimizer, step))


def _own_store(world: World) -> Any:
    """Return a store whose keys no other model uses. Collective."""
    token = world.broadcast_object(time.time_ns())
    c10d: Any = dist.distributed_c10d
    return c10d.PrefixStore(f"recovery-{token}", shared_store())
