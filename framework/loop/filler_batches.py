"""Stand-ins: what a rank runs that has nothing of its own to run, where ranks go through the model in step.

Some strategies gather weights in every forward pass, or reduce gradients as backward passes produce them; some layers
exchange statistics. There all ranks must run the same number of passes. A rank whose data has run out, or whose step
returned None, runs a batch that gave a loss before, with weight 0: hooks, logs, metrics, buffers and random generators
do not see it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from itertools import islice
from typing import Any

from torch import Tensor

from ..core.errors import LoopError
from ..core.step_output import loss_of
from ..data.accumulation_window import Windows
from ..diagnostics.isolated_step import fresh, isolated
from ..distributed.control import Agreement
from ..parallel.strategy import StepFunction
from ..parallel.zero_backward import Calls, CallWatch
from ..run.run import Run

STAND_IN: Any = object()
"""The batch that asks for a stand-in."""
_MOST_TRIED = 16
_OTHER_INDICES = 4


class StandIns:
    """The user's training step, with a stand-in where it gives no loss.

    ``meets_in_forward`` says whether forward passes hold collectives; else backward passes alone do, and a forward pass
    more or less does no harm.
    """

    def __init__(
        self, run: Run, transfer: Callable[[Any], Any] | None, windows: Windows | None, meets_in_forward: bool
    ) -> None:
        self._run = run
        self._transfer = transfer
        self._windows = windows
        self._watch = CallWatch(run.module) if meets_in_forward else None
        self._step: StepFunction
        self._kept: tuple[Any, int] | None = None
        self._window: list[Any] = []
        self._first = self._next = 0
        self._stood_in = False
        self.began = False
        """Whether a window was run, after which each rank has a batch to stand in with."""
        self._loss: Tensor | None = None

    def wrap(self, step: StepFunction) -> StepFunction:
        """Return what is to be routed in the place of the user's step."""
        self._step = step
        return self._routed

    def telling(self, routed: StepFunction) -> StepFunction:
        """Return a call of the routed step that returns None for a stand-in, and keeps its loss for ``take_loss``."""

        def forward(batch: Any, index: int) -> Any:
            output = routed(batch, index)
            if not self._stood_in:
                return output
            self._loss = output
            return None

        return forward

    def take_loss(self) -> Tensor:
        """Return the loss of the stand-in that was run just now, as the strategy returned it."""
        loss, self._loss = self._loss, None
        assert loss is not None
        return loss

    def begin(self, batches: list[Any], first: int, consumed: int) -> None:
        """Take note of the window in progress: this rank's batches, the index of the first, and how many it counts."""
        self._window, self._first, self._next = batches, first, first + consumed

    def share(self, batches: list[Any], agreement: Agreement) -> None:
        """Give ranks without a batch one of the lowest rank that has any. Collective, once, at the first window."""
        self.began = True
        world = self._run.world
        if agreement.ranks_with_data == world.size:
            return
        source = world.all_gather_object(bool(batches)).index(True)
        batch = world.broadcast_object(batches[0] if world.rank == source else None, source)
        if not batches:
            self._kept = (batch, self._run.progress.batch_in_epoch)

    def release(self) -> None:
        """Take what was put on the module off again."""
        if self._watch is not None:
            self._watch.remove()

    # ---- inside what the strategy wraps ---------------------------------------------------------------------------

    def _routed(self, batch: Any, index: int) -> Any:
        self._stood_in = batch is STAND_IN
        if self._stood_in:
            return self._stand_in(None, index)
        # Before the step, which may take the batch apart.
        own = fresh(self._window[index - self._first])
        output, loss, calls = self._run_step(batch, index)
        if loss is not None:
            self._kept = (own, index)
            return output
        self._stood_in = True
        if self._watch is not None and calls:
            return self._watch.idle_loss(calls)
        return self._stand_in(own, index)

    def _run_step(self, batch: Any, index: int) -> tuple[Any, Tensor | None, Calls]:
        """Run the user's step; return its output, its loss, and the calls of modules it made."""
        watch = self._watch
        if watch is None:
            output = self._step(batch, index)
            return output, loss_of(output), []
        watch.open()
        output = self._step(batch, index)
        calls = watch.close()
        loss = loss_of(output)
        if loss is not None:
            watch.learn(calls)
        return output, loss, calls

    def _stand_in(self, own: Any, index: int) -> Tensor:
        """Return the loss of a batch that has one; ``own`` is this rank's batch without a loss, if it has any."""
        with isolated(self._run.module), closing(self._candidates(own, index)) as candidates:
            for batch, place in candidates:
                given = fresh(batch) if self._transfer is None else self._transfer(fresh(batch))
                _, loss, calls = self._run_step(given, place)
                if loss is not None:
                    self._kept = (batch, place)
                    return loss
                if self._watch is not None and calls:
                    return self._watch.idle_loss(calls)
        raise LoopError(
            f"training_step returned None on rank {self._run.world.rank} for every batch that could stand in for one "
            "without a loss, but this strategy or model makes all ranks run the same passes: let training_step return "
            "a loss on every rank, and give batches that are not to count a batch_weight of 0."
        )

    def _candidates(self, own: Any, index: int) -> Generator[tuple[Any, int], None, None]:
        """Yield batches and their indices: the one that gave a loss last, then those that come next.

        In the end come other indices, by which a step may decide.
        """
        known = [] if self._kept is None else [self._kept]
        yield from known
        for place, batch in enumerate(self._window, self._first):
            if place > index:
                yield batch, place
        if self._windows is not None:
            with closing(self._windows.coming(self._next)) as coming:
                yield from islice(coming, _MOST_TRIED)
        for batch, place in [*known, *([] if own is None else [(own, index)])]:
            yield from ((batch, place + further) for further in range(1, _OTHER_INDICES))
