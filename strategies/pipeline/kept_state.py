"""The attributes that a training step changes, made equal on all ranks of a pipeline.

The step runs on each rank, to its end on the rank with the last stage alone. The changes that it makes there, such as
appending a loss to a list, replace those of the other ranks after each window. If a step depends on attributes that it
changed for an earlier micro-batch of the window, the ranks compute other inputs of the first block: that is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...framework.core.errors import LoopError
from ...framework.core.torch_internals import tree_leaves, tree_map
from ...framework.diagnostics.program_state import Large, ProgramState, Taken, packed, sendable
from ...framework.distributed.world import World
from .absent import absent_like
from .schedules import Place

_TOLERANCE = 1e-5
# On a device reading the inputs of the first block makes the host wait: in the first windows, and in some later ones.
_FIRST_WINDOWS, _EVERY = 4, 64


class KeptState:
    """Sends what the steps of a window kept, and compares what the ranks give to the first block.

    Args:
        module: the user's module.
        blocks: those of all stages, which each rank has for itself.
        place: the stages of this rank.
        group: the ranks of the pipeline.
    """

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module], world: World, place: Place, group: dist.ProcessGroup
    ) -> None:
        self._state = ProgramState.of(module, without=blocks)
        self._world, self._group = world, group
        self._source = dist.get_global_rank(group, place.rank_of(place.stages - 1))
        self._runs_again = len(place.own) > 1
        self._schedule = place.kind
        self._taken: Taken = []
        self._before: Taken = []
        self._inputs: list[list[Tensor]] = []
        self._compares = False

    def begin(self, number: int, count: int) -> None:
        """Begin a window of ``count`` micro-batches."""
        self._taken = self._state.take()
        self._compares = self._world.device.type == "cpu" or number < _FIRST_WINDOWS or number % _EVERY == 0
        self._inputs = [[] for _ in range(count)]

    def begin_pass(self) -> None:
        """Begin a pass of a step."""
        if self._runs_again:
            self._before = self._state.take()

    def check_unchanged(self) -> None:
        """Refuse a step that has changed what it keeps since the beginning of the pass, before it calls the blocks.

        Raises:
            LoopError: it has, and this rank runs the step several times for a micro-batch.
        """
        if self._runs_again and (changed := self._state.changes(self._before)):
            raise LoopError(
                f"the step changes self.{changed[0].name} before it calls the blocks, and with several stages on each "
                "rank of a pipeline it runs several times for a micro-batch: do that in on_train_batch_start, or use "
                "schedule='1f1b'."
            )

    def enter(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any], is_last: bool) -> None:
        """Note the arguments of the first block for a micro-batch.

        Raises:
            LoopError: this rank runs the step several times for it, and the step has changed what it keeps.
        """
        self.check_unchanged()
        if self._compares:
            # The pass of the last stage is the one that counts.
            self._inputs[position].insert(0 if is_last else len(self._inputs[position]), _digest((args, kwargs)))

    def share(self, values: Tensor, message: Any, is_source: bool) -> tuple[Tensor, Any]:
        """Broadcast values, a message and what the steps of the window kept. Collective.

        Raises:
            LoopError: the ranks have given different inputs to the first block.
        """
        sent: Any = None
        if is_source:
            changes = packed(self._state.changes(self._taken))
            sent = (changes, sendable(message)) if changes or message is not None else None
        count, device = values.numel(), values.device
        has_message = torch.tensor([float(sent is not None)], dtype=torch.float64)
        found = [each[0] if each else torch.zeros((), dtype=torch.float64, device=device) for each in self._inputs]
        on_host = device.type == "cpu"
        vector = torch.cat(
            [values.double(), *([torch.stack(found)] if found else []), *([has_message] if on_host else [])]
        )
        dist.broadcast(vector, self._source, group=self._group)
        if self._world.is_alone:
            # A rehearsal, whose tensors have no values.
            return vector[:count].to(values.dtype), message
        if on_host:
            has_message = vector[-1:]
        else:
            dist.broadcast(has_message, self._source, group=self._group)
        if self._compares:
            self._compare(vector[count : count + len(found)].tolist())
        if not is_source:
            self._state.put_back(self._taken)
        if has_message.item():
            given = [sent]
            dist.broadcast_object_list(given, self._source, group=self._group, device=torch.device("cpu"))
            if not is_source:
                changes, message = given[0]
                self._state.apply(changes, self._received)
                message = tree_map(self._received, message, is_leaf=lambda each: isinstance(each, Large))
        self._taken, self._before, self._inputs = [], [], []
        return vector[:count].to(values.dtype), message

    def _received(self, value: Any) -> Any:
        if isinstance(value, Large):
            return absent_like(torch.empty(value.shape, dtype=value.dtype, device="meta"))
        return value.to(self._world.device) if isinstance(value, Tensor) else value

    def _compare(self, wanted: list[float]) -> None:
        for position, (right, own) in enumerate(zip(wanted, self._inputs, strict=True)):
            for each in own:
                number = each.item()
                if abs(number - right) > _TOLERANCE * max(abs(number), abs(right)):
                    raise LoopError(
                        "the ranks of the pipeline computed different inputs of the first block for micro-batch "
                        f"{position} of a window: they depend on what the step kept for an earlier one, or on the "
                        "rank. Compute what they depend on in on_train_batch_start, or use accumulate_grad_batches=1, "
                        "or strategy='fsdp' or 'ddp'."
                    )


def _digest(given: Any) -> Tensor:
    """Return a number that depends on all tensors."""
    tensors = [each.detach() for each in tree_leaves(given) if isinstance(each, Tensor) and each.numel()]
    return sum(
        (torch.linalg.vector_norm(each.float()).double() + each.flatten()[0].double() for each in tensors),
        start=torch.zeros((), dtype=torch.float64, device=tensors[0].device),
    )
