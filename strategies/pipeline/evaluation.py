"""Forward passes without backward passes: each micro-batch passes through the stages by messages between ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...framework.distributed.world import World
from ...framework.parallel.strategy import StepFunction
from .blocks import Stages
from .calls import BlockCalls, StagePass
from .passes import HiddenStates
from .random_numbers import SharedDraws
from .schedules import Place


class Evaluation:
    """Runs steps of an evaluation on the stages of this rank.

    The rank with the last stage broadcasts the output of the last block, and every rank runs the rest of the step with
    it. So a step returns, logs and stores the same values on all ranks of a pipeline.

    Args:
        place: the stages and ranks.
        group: the ranks of the pipeline.
        stages: the division of the model.
        hidden: knows the hidden states between stages.
        gathered: returns the context of a step, in which this rank holds its stages in full.
    """

    def __init__(
        self,
        world: World,
        place: Place,
        group: dist.ProcessGroup,
        stages: Stages,
        calls: BlockCalls,
        hidden: HiddenStates,
        gathered: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._world, self._place, self._group = world, place, group
        self._stages, self._calls, self._hidden = stages, calls, hidden
        self._gathered = gathered
        self._number = 0
        self._is_running = False

    def route(self, step: StepFunction) -> StepFunction:
        """Return the function that runs a step. Collective."""

        def routed(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return step(*args, **kwargs)
            self._is_running = True
            try:
                with self._gathered():
                    return self._run(lambda: step(*args, **kwargs))
            finally:
                self._is_running = False

        return routed

    def _run(self, step: Callable[[], Any]) -> Any:
        between: list[Tensor] = []
        self._number += 1
        draws = SharedDraws(self._world.device, self._number, repeats=False)

        def begin(hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            draws.leave()
            between[:] = [self._hidden.after(hidden, args, kwargs)]

        def receive(stage: int, hidden: Tensor) -> Tensor:
            received = torch.empty_like(between[0], device=self._world.device)
            dist.recv(received, self._peer(stage - 1), group=self._group)
            return received

        def deliver(stage: int, output: Tensor) -> None:
            dist.send(output.detach().contiguous(), self._peer(stage + 1), group=self._group)

        def end(output: Tensor | None, hidden: Tensor) -> Tensor:
            output = torch.empty_like(between[0], device=self._world.device) if output is None else output.contiguous()
            dist.broadcast(output, self._peer(self._place.stages - 1), group=self._group)
            draws.join(self._place.stages)
            return output

        own = {stage: partial(receive, stage) for stage in self._place.own}
        with draws.micro_batch(0, self._place.own[0]):
            return self._calls.during(StagePass(self._stages, own, deliver, begin, end), step)[1]

    def _peer(self, stage: int) -> int:
        return dist.get_global_rank(self._group, self._place.rank_of(stage))
