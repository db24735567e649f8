"""The schedules of a pipeline: torch's classes, the layout of their stages over ranks, and the windows they can run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage, schedules as torch_schedules

from ...framework.core.errors import unknown


@dataclass(frozen=True)
class Kind:
    """A schedule.

    Args:
        torch_name: the name of torch's class.
        takes_several: whether its ranks may have several stages each.
        is_v: whether the first and the last stage are on the same rank; stage ``s`` and ``last - s`` share one.
        instead: the class for windows that the schedule does not run, such as short ones; None if it runs any.
    """

    torch_name: str
    takes_several: bool
    is_v: bool = False
    instead: str | None = None

    @property
    def per_rank(self) -> int:
        """The number of stages of each rank, where the user gives none."""
        return 2 if self.is_v or self.torch_name in ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS") else 1

    def runs(self, windows: int, ranks: int) -> bool:
        """Whether torch's class runs a window of this many micro-batches."""
        if self.torch_name == "Schedule1F1B":
            return windows >= ranks
        if self.torch_name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"):
            return windows >= ranks and windows % (windows // ranks) == 0
        return True


SCHEDULES = {
    "gpipe": Kind("ScheduleGPipe", False),
    "1f1b": Kind("Schedule1F1B", False, instead="ScheduleGPipe"),
    "interleaved-1f1b": Kind("ScheduleInterleaved1F1B", True, instead="ScheduleLoopedBFS"),
    "zero-bubble": Kind("ScheduleInterleavedZeroBubble", True, instead="ScheduleLoopedBFS"),
    "zero-bubble-v": Kind("ScheduleZBVZeroBubble", True, is_v=True),
}


def bubble(windows: int, ranks: int) -> float:
    """Return the part of the time in which a rank with one stage waits, in a window of this many micro-batches."""
    return (ranks - 1) / (windows + ranks - 1)


def kind_named(name: Any) -> Kind:
    """Return a schedule by its name.

    Raises:
        UnknownNameError: there is none of this name.
    """
    if name not in SCHEDULES:
        raise unknown("schedule", str(name), list(SCHEDULES))
    return SCHEDULES[name]


@dataclass(frozen=True)
class Place:
    """The stages of a pipeline and the ranks that hold them.

    The first rank of a pipeline holds its last stage, so that it computes the losses. Of ranks that read the same data
    the results of the first one count.
    """

    kind: Kind
    ranks: int
    per_rank: int
    rank: int
    """The number of this rank in its pipeline."""

    @property
    def stages(self) -> int:
        """The number of stages."""
        return self.ranks * self.per_rank

    def rank_of(self, stage: int) -> int:
        return self._physical(self._logical(stage))

    @property
    def own(self) -> list[int]:
        """The stages of this rank, in order."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == self.rank]

    @property
    def number_for_torch(self) -> int:
        """The number of this rank in torch's schedules, which begin with the first stage."""
        return self._physical(self.rank)

    def _logical(self, stage: int) -> int:
        if self.kind.is_v and (stage // self.ranks) % 2:
            return self.ranks - 1 - stage % self.ranks
        return stage % self.ranks

    def _physical(self, logical: int) -> int:
        # Its own inverse. In the form of a V, the rank with the first stage has the last one too.
        return logical if self.kind.is_v else self.ranks - 1 - logical


def build(
    place: Place,
    modules: Sequence[nn.Module],
    hidden: Tensor,
    count: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> Callable[[], None]:
    """Return a function that runs a window of ``count`` micro-batches.

    Args:
        place: the stages and ranks.
        modules: one for each stage of this rank. Called with the number of a micro-batch on the first stage, else with
            hidden states and ``index``, the number; returns hidden states, the last one a loss.
        hidden: a tensor on the meta device with shape and dtype of the hidden states.
        count: the number of micro-batches.
        group: the ranks of the pipeline.
    """
    numbers, loss = torch.arange(count), torch.empty((), device="meta", requires_grad=True)
    stages = []
    for index, module in zip(place.own, modules, strict=True):
        is_first, is_last = index == 0, index == place.stages - 1
        stage = PipelineStage(
            module,
            index,
            place.stages,
            device,
            input_args=numbers[:1] if is_first else hidden,
            output_args=loss if is_last else hidden,
            group=group,
        )
        stage.group_rank = place.number_for_torch
        stages.append(stage)
    name = place.kind.torch_name if place.kind.runs(count, place.ranks) else place.kind.instead
    assert name is not None
    made = getattr(pipelining, name, None) or getattr(torch_schedules, name)
    several = issubclass(made, torch_schedules.PipelineScheduleMulti)
    schedule = made(stages if several else stages[0], count, loss_fn=_output, scale_grads=False)
    for stage in stages:
        # torch numbers ranks from the first stage on; messages are sent by the numbers in the group.
        stage.stage_index_to_group_rank = {each: place.rank_of(each) for each in range(place.stages)}
        stage.group_rank = place.rank
    has_first, has_last = 0 in place.own, place.stages - 1 in place.own

    def run() -> None:
        given = (numbers,) if has_first else ()
        schedule.step(*given, index=numbers, target=numbers if has_last else None, return_outputs=False)

    return run


def _output(output: Tensor, target: Tensor) -> Tensor:
    """Return the output of the last stage, which is the loss."""
    return output
